"""Use the weights of a run: predict the classes of images, export the network."""
