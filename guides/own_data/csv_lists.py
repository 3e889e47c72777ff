"""Make the lists that imagenet.py reads, train.txt and val.txt, from a CSV: python csv_lists.py DATA

DATA has train_images/ and train.csv with the columns image_id and label. A tenth validates. If several images
belong together (of a patient), shuffle and divide their ids, not the rows.
"""

import csv
import pathlib
import random
import sys

root = pathlib.Path(sys.argv[1])
images = {path.stem: path.relative_to(root) for path in root.glob("train_images/*")}
with open(root / "train.csv", newline="") as file:
    rows = [(images[pathlib.Path(row["image_id"]).stem], row["label"]) for row in csv.DictReader(file)]
random.Random(0).shuffle(rows)
for name, part in (("val.txt", rows[: len(rows) // 10]), ("train.txt", rows[len(rows) // 10 :])):
    with open(root / name, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *part])
