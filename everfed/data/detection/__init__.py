"""Object detection: what a YOLO's outputs mean, its loss, its detections, and pictures of them.

Boxes are rows (class, centre x, centre y, width, height) in shares of the image, padded with zeros to a fixed number;
a row without width is padding. So a target is a tensor of fixed shape, and memories, replay and DER take it as it is.
"""

from everfed.data.detection.boxes import CX, CY, HEIGHT, LABEL, WIDTH, corners, padded
from everfed.data.detection.decoding import decode, detections
from everfed.data.detection.loss import YoloLoss

__all__ = ["CX", "CY", "HEIGHT", "LABEL", "WIDTH", "YoloLoss", "corners", "decode", "detections", "padded"]
