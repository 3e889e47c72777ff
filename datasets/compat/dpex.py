"""The data loader of Dpex: torch's DataLoader with workers on Ray, by changing one name."""

from datasets.loaders.ray.engine import RayDataLoader

DpexDataLoader = RayDataLoader
