"""Masks of class numbers, or of colours, and the mean IoU, for the blocks of a project:

import glob

from torchvision.transforms import v2

train_set = Pairs(glob.glob("DATA/train/*_mask.png"), v2.RandomCrop(512), [(0, 0, 0), (128, 0, 0)])
criterion = torch.nn.CrossEntropyLoss(ignore_index=255)
log.use(metrics.Metrics(miou=MeanIoU(2), best="miou"))
"""

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors

from common.run import metrics


class Pairs(torch.utils.data.Dataset):  # x.jpg with x_mask.png: class numbers, or colours[number] (RGB)
    def __init__(self, masks, crop, colours=()):
        self.masks, self.crop, self.colours = sorted(masks), crop, colours

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, number):
        path = self.masks[number]
        image, mask = (Image.open(name) for name in (path.replace("_mask.png", ".jpg"), path))
        classes = [(np.array(mask.convert("RGB")) == colour).all(-1) for colour in self.colours]
        mask = np.select(classes, range(len(classes)), 255) if classes else np.array(mask)
        image, mask = self.crop(tv_tensors.Image(image.convert("RGB")), tv_tensors.Mask(mask))
        return image / 255, mask.long()


class MeanIoU(metrics.ConfusionMatrix):  # takes logits [N, classes, H, W]
    def value(self, sums):
        matrix = sums.view(self.classes, self.classes)
        union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
        return (matrix.diagonal() / union).nanmean().item()
