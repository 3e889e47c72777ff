"""Use the weights of a run: predict the classes of images, export the network.

It takes a file of weights. The network and the image size are options, or are read from the run's folder, as
the names of the classes are. It gives a CSV of predictions, or a file of ONNX or torch.export whose logits
were compared. Code is run only if the user names it (--model). Outside are networks that do not return one
row of logits for each image.
"""
