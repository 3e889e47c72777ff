"""Export the network of a run for programs that do not have this repository.

    python -m launch export OUT/best.pth --to model.onnx         ONNX: onnxruntime, TensorRT, OpenVINO, ...
    python -m launch export OUT/best.pth --to model.pt2          torch.export

Input float32 [N, channels, size, size], any N, pixels / 255 normalised by mean and std; output logits [N,
classes]. The file also contains network, size, mean, std and classes, as JSON (`bootfile.json`: metadata of
ONNX, an extra file of torch.export). Before FILE is written, the exported network is loaded. Its logits must
equal those of the original to 1e-4, also for batches of other sizes than the exported one.
"""

import os

from bootfile.ground.errors import BadInput
from common.console.arguments import FLAG, Parser
from launch.inference import arguments as of_network

_FORMS = (".onnx", ".pt2")


def main(arguments: list[str]) -> int:
    """Export and return 0. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch export")
    of_network.add(parser)
    names = f"a name that ends in {', '.join(_FORMS)}"
    parser.add_argument("--to", metavar="FILE", required=True, help=names)
    parser.add_argument("--force", **FLAG, help="replace FILE")
    args = parser.parse_args(arguments)
    if os.path.splitext(args.to)[1].lower() not in _FORMS:
        raise BadInput(f"--to {args.to}: expected {names}")
    if os.path.lexists(args.to) and not args.force:
        raise BadInput(f"--to {args.to} exists: name another file, or add --force")
    from launch.inference import exports  # imports torch, which --help does not need

    return exports.write(args)
