"""The data loader of Dpex: torch's DataLoader with workers on Ray, by changing one name."""

from datasets.loaders.ray.data_loader import RayDataLoader

DpexDataLoader = RayDataLoader
