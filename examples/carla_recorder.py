"""Records drives of a CARLA simulator as a folder that everfed reads: images and boxes, by town.

Needs a running CARLA server (0.9.14 or later, https://carla.org) and its Python package in the same version; neither is
installed with everfed, and this script was written against CARLA's documentation without a server at hand.

    ./CarlaUE4.sh -RenderOffScreen &
    pip install carla==0.9.15 pillow
    python carla_recorder.py --town Town01 --frames 400 --out drives
    python carla_recorder.py --town Town04 --frames 400 --out drives --vehicles 80      # it has a highway

Then `dataset = "drives"` with `home = ["Town01"]` and `away = ["Town04"]` in a recipe like fedgp/figure4-carla. A call
adds a town: the last `--test` share of its frames is for testing.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
from pathlib import Path
from typing import Any

CATEGORIES = ["vehicle", "bike", "motobike", "traffic_light", "traffic_sign"]
WIDTH, HEIGHT, FIELD_OF_VIEW = 320, 192, 90.0
FARTHEST = 60.0  # metres; what is farther is a few pixels
EVERY = 10  # simulated steps of 0.1 s between frames
Frame = tuple[str, list[tuple[str, list[float]]]]  # file, and (category, [x, y, width, height] in pixels) of its boxes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=2000)
    parser.add_argument("--town", default="Town01")
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--vehicles", type=int, default=40, help="other road users")
    parser.add_argument("--test", type=float, default=0.25, help="share of the frames for testing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    record(parser.parse_args())


def record(options: argparse.Namespace) -> None:
    """Drive by autopilot and keep every tenth step."""
    import carla

    client = carla.Client(options.host, options.port)
    client.set_timeout(60.0)
    world = client.load_world(options.town)
    before = world.get_settings()
    settings = world.get_settings()
    settings.synchronous_mode, settings.fixed_delta_seconds = True, 0.1
    world.apply_settings(settings)
    actors: list[Any] = []
    try:
        ego, camera, frames = _cast(carla, client, world, options, actors)
        rows = _drive(carla, world, ego, camera, frames, options)
        write(rows, options.out, options.town, options.test)
    finally:
        for actor in actors:
            actor.destroy()
        world.apply_settings(before)


def _cast(carla: Any, client: Any, world: Any, options: argparse.Namespace, actors: list[Any]) -> tuple[Any, Any, Any]:
    """Our vehicle with a camera, and other road users, all by autopilot."""
    draw, traffic = random.Random(options.seed), client.get_trafficmanager()
    traffic.set_synchronous_mode(True)
    traffic.set_random_device_seed(options.seed)
    blueprints, places = world.get_blueprint_library(), world.get_map().get_spawn_points()
    draw.shuffle(places)
    for place in places[: options.vehicles + 1]:
        kind = blueprints.find("vehicle.tesla.model3") if not actors else draw.choice(blueprints.filter("vehicle.*"))
        actor = world.try_spawn_actor(kind, place)
        if actor is not None:
            actor.set_autopilot(True, traffic.get_port())
            actors.append(actor)
    lens = blueprints.find("sensor.camera.rgb")
    for key, value in (("image_size_x", WIDTH), ("image_size_y", HEIGHT), ("fov", FIELD_OF_VIEW)):
        lens.set_attribute(key, str(value))
    camera = world.spawn_actor(lens, carla.Transform(carla.Location(x=1.6, z=1.7)), attach_to=actors[0])
    actors.append(camera)
    frames: queue.Queue[Any] = queue.Queue()
    camera.listen(frames.put)
    return actors[0], camera, frames


def _drive(carla: Any, world: Any, ego: Any, camera: Any, frames: Any, options: argparse.Namespace) -> list[Frame]:
    """The frames as (file, boxes)."""
    images = options.out / "images" / options.town
    images.mkdir(parents=True, exist_ok=True)
    labels = {"traffic_light": carla.CityObjectLabel.TrafficLight, "traffic_sign": carla.CityObjectLabel.TrafficSigns}
    signs = [(category, box) for category, label in labels.items() for box in world.get_level_bbs(label)]
    rows = []
    while len(rows) < options.frames:
        for _ in range(EVERY):
            world.tick()
            image = frames.get()
        file = f"images/{options.town}/{len(rows):05d}.jpg"
        image.save_to_disk(str(options.out / file))
        rows.append((file, _boxes(carla, world, ego, camera, signs)))
    return rows


def _boxes(
    carla: Any, world: Any, ego: Any, camera: Any, signs: list[tuple[str, Any]]
) -> list[tuple[str, list[float]]]:
    """What is in front of the camera and near, as (category, [x, y, width, height] in pixels)."""
    found = []
    for actor in world.get_actors().filter("vehicle.*"):
        if actor.id != ego.id:
            wheels = int(actor.attributes.get("number_of_wheels", 4))
            kind = "vehicle" if wheels > 2 else "bike" if actor.attributes.get("base_type") == "bicycle" else "motobike"
            corners = actor.bounding_box.get_world_vertices(actor.get_transform())
            found.append((kind, corners, actor.get_location()))
    still = carla.Transform()  # boxes of the level lie in the world's own frame already
    found += [(kind, box.get_world_vertices(still), box.location) for kind, box in signs]
    here, matrix = camera.get_transform(), camera.get_transform().get_inverse_matrix()
    boxes = []
    for kind, corners, place in found:
        if here.location.distance(place) < FARTHEST:
            box = project(corners, matrix)
            if box is not None:
                boxes.append((kind, box))
    return boxes


def project(corners: Any, matrix: Any) -> list[float] | None:
    """The rectangle around eight corners in the image, or None where they are not in front of the camera."""
    focal = WIDTH / (2 * math.tan(math.radians(FIELD_OF_VIEW) / 2))
    points = []
    for corner in corners:
        x, y, z = (sum(row[i] * v for i, v in enumerate((corner.x, corner.y, corner.z, 1.0))) for row in matrix[:3])
        if x < 0.5:  # behind or beside the lens
            return None
        points.append((WIDTH / 2 + focal * y / x, HEIGHT / 2 - focal * z / x))
    left, right = (min(p[0] for p in points), max(p[0] for p in points))
    top, bottom = (min(p[1] for p in points), max(p[1] for p in points))
    if right <= 0 or bottom <= 0 or left >= WIDTH or top >= HEIGHT:
        return None
    return [left, top, right - left, bottom - top]


def write(rows: list[Frame], out: Path, town: str, test: float) -> None:
    """Add the frames to train.json and test.json; a town that is there already is replaced."""
    cut = round(len(rows) * (1 - test))
    for part, own in (("train", rows[:cut]), ("test", rows[cut:])):
        path = out / f"{part}.json"
        table = json.loads(path.read_text()) if path.exists() else {"images": [], "annotations": []}
        table["images"] = [image for image in table["images"] if image["domain"] != town]
        known = {image["id"] for image in table["images"]}
        table["annotations"] = [one for one in table["annotations"] if one["image_id"] in known]
        table["categories"] = [{"id": i, "name": name} for i, name in enumerate(CATEGORIES)]
        number = 1 + max(known, default=-1)
        for offset, (file, boxes) in enumerate(own):
            image = {"id": number + offset, "file_name": file, "width": WIDTH, "height": HEIGHT, "domain": town}
            table["images"].append(image)
            table["annotations"] += [
                {"image_id": image["id"], "category_id": CATEGORIES.index(kind), "bbox": box, "iscrowd": 0}
                for kind, box in boxes
            ]
        for index, one in enumerate(table["annotations"]):
            one["id"] = index
        path.write_text(json.dumps(table))


if __name__ == "__main__":
    main()
