"""Export the network of a run for programs that do not have this repository.

    python -m launch export OUT/best.pth --to model.onnx         ONNX: onnxruntime, TensorRT, OpenVINO, ...
    python -m launch export OUT/best.pth --to model.pt2          torch.export

Input float32 [N, channels, size, size], any N, pixels / 255 normalised by mean and std; output logits [N,
classes]. The file also contains network, size, mean, std and classes, as JSON (`bootfile.json`: metadata of
ONNX, an extra file of torch.export). Before FILE is written, the exported network is loaded. Its logits must
equal those of the original to 1e-4, also for batches of other sizes than the exported one.
"""

import io
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootfile.console import outputs
from bootfile.ground.errors import BadInput, import_optional, in_one_line
from common.console.arguments import FLAG, Parser
from launch.inference import predict

if TYPE_CHECKING:  # --help does not need torch
    import torch

    from launch.inference.trained import Trained

NOTE = "bootfile.json"  # the name of the JSON inside the file
BATCH = 2  # images of the batch that is exported
OTHERS = (1, 5)  # images of the other batches that are compared
TOLERANCE = 1e-4


def main(arguments: list[str]) -> int:
    """Export and return 0. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch export")
    predict.add_network(parser)
    names = f"a name that ends in {', '.join(FORMS)}"
    parser.add_argument("--to", metavar="FILE", required=True, help=names)
    parser.add_argument("--force", **FLAG, help="replace FILE")
    args = parser.parse_args(arguments)
    ending = os.path.splitext(args.to)[1].lower()
    if ending not in FORMS:
        raise BadInput(f"--to {args.to}: expected {names}")
    outputs.check_folder(args.to)
    if os.path.lexists(args.to) and not args.force:
        raise BadInput(f"--to {args.to} exists: name another file, or add --force")
    import torch

    from launch.inference import trained

    network = trained.load(args.weights, args.arch, args.image_size, args.model)
    names_of_facts = ("name", "channels", "size", "mean", "std", "classes")
    facts = json.dumps({name: getattr(network, name) for name in names_of_facts})
    example = torch.zeros(BATCH, network.channels, network.size, network.size)
    try:
        with torch.no_grad():  # as in evaluation; with gradients convolutions use other algorithms on a CPU
            content, run = FORMS[ending](network, example, facts)
            difference = compare(network, run)
    except BadInput:
        raise
    except Exception as error:  # an exporter's error for an unsupported network
        reason = in_one_line(error, 300)
        raise BadInput(f"torch {torch.__version__} cannot export {network.name}: {reason}") from error
    # before it is written: the file may be used where nothing compares it any more
    if not difference <= TOLERANCE:
        share = f"{difference:.2g} of the largest, expected at most {TOLERANCE:g}"
        raise BadInput(f"{args.to} is not written: its logits differ from the network's by {share}")
    with outputs.open_result(args.to) as file:
        file.write(content)
    shape = f"float32 [N, {network.channels}, {network.size}, {network.size}] -> [N, {len(network.classes)}]"
    print(f"{args.to}: {network.name}, {len(content) / 1e6:.1f} MB, {shape}, logits within {difference:.1g}")
    return 0


def compare(network: "Trained", run: "Callable[[torch.Tensor], torch.Tensor]") -> float:
    """Return the largest difference between the logits of `run` and of the network, as a share of the largest
    logit (at least 1). It is measured on batches of BATCH and OTHERS images of noise."""
    import torch

    generator = torch.Generator().manual_seed(0)
    # other batch sizes, too: an exporter may have fixed the one that it has traced
    shares = []
    for count in (BATCH, *OTHERS):
        batch = torch.randn(count, network.channels, network.size, network.size, generator=generator)
        expected = network.model(batch)
        logits = run(batch)
        if logits.shape != expected.shape:
            return float("inf")
        shares.append((logits - expected).abs().max() / expected.abs().max().clamp(min=1))
    return float(torch.stack(shares).max())  # NaN if one of them is


def _onnx(network: "Trained", example: "torch.Tensor", facts: str) -> tuple[bytes, Any]:
    """Return the bytes of an ONNX file, and a function that computes with them, which compare() calls."""
    import torch

    onnx = import_optional("onnx", "--to .onnx needs onnx")
    import_optional("onnxscript", "--to .onnx needs onnxscript")
    runtime = import_optional("onnxruntime", "--to .onnx is checked with onnxruntime")
    program: Any = torch.onnx.export(
        network.model,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    model = program.model_proto
    onnx.helper.set_model_props(model, {NOTE: facts})
    content = model.SerializeToString()
    # from the bytes that are written, and not from the program in memory
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: "torch.Tensor") -> "torch.Tensor":
        [logits] = session.run(["logits"], {"images": images.numpy()})
        return torch.from_numpy(logits)

    return content, run


def _torch_export(network: "Trained", example: "torch.Tensor", facts: str) -> tuple[bytes, Any]:
    """Return the bytes of a file of torch.export, and the module that they hold, which compare() calls."""
    import torch

    batch = torch.export.Dim("batch")
    program = torch.export.export(network.model, (example,), dynamic_shapes=({0: batch},))
    target = io.BytesIO()
    torch.export.save(program, target, extra_files={NOTE: facts})
    loaded = torch.export.load(io.BytesIO(target.getvalue())).module()
    return target.getvalue(), loaded


FORMS: dict[str, Callable[..., tuple[bytes, Any]]] = {".onnx": _onnx, ".pt2": _torch_export}
