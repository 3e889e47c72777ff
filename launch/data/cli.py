"""Show the samples of a step of a run, or the steps of a sample.

    python -m launch data RUN --step 4711                  rank, id, label, crop, flip and file of each sample
    python -m launch data RUN --step 4711 --count 4        those of the 4 steps up to this one
    python -m launch data RUN --step 4711 --ids            rank and id only: this reads no data
    python -m launch data RUN --step 4711 --to step.png    draw the images as the model got them
    python -m launch data RUN --around 4711                the samples with the largest losses up to step 4711
    python -m launch data RUN --sample FILE_OR_ID          every epoch, step and rank that had the sample

RUN is the output folder of a job: it is only read. Of a Dataset of your own only the ids are known. Images
are read from the files, on the CPU, without a `transform` of your own. Every answer is compared with the
receipt. Exit codes: 0; 2 bad input, or other data: another fingerprint, or another digest than the receipt's.
"""

from bootfile.ground.errors import BadInput, print_line
from common.console.arguments import Parser, positive_int


def main(arguments: list[str]) -> int:
    """Print the answer and return 0: `python -m launch data` calls it. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch data")
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of a run")
    add("--step", type=positive_int, metavar="N", help="print the samples of step N, counted from 1")
    add("--count", type=positive_int, default=1, metavar="N", help="steps up to --step (default: 1)")
    help = "print the largest losses in the steps up to N (--sample_losses)"
    add("--around", type=positive_int, metavar="N", help=help)
    add("--ids", action="store_true", help="print rank and id only: this reads no data")
    add("--to", metavar="FILE.png", help="also draw the images of the steps")
    add("--force", action="store_true", help="replace FILE.png even if it was not made by this command")
    add("--sample", metavar="FILE_OR_ID", help="print the steps that had this sample")
    add("--data_url", metavar="FOLDER", help="where the data are now (default: as in the run)")
    args = parser.parse_args(arguments)
    if [args.step, args.sample, args.around].count(None) != 2:
        raise BadInput("expected one of --step N, --around N and --sample FILE_OR_ID")
    if args.to and (not args.step or args.ids or not args.to.endswith(".png")):
        raise BadInput(f"--to {args.to}: expected a name that ends in .png, with --step and without --ids")
    from launch.data import answers  # imports torch, which --help does not need

    for line in answers.find(args):
        print_line(line)
    return 0
