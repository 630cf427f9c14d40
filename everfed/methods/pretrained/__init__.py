"""Methods for pretrained networks: a frozen backbone, and few trained numbers that travel."""
