"""What `launch bench train` found, for people: a table, and a bar chart."""

from common.exits import import_optional


def text(found: dict) -> str:
    """The table. found: what launch/bench/train.py prints as JSON."""
    peaks = [
        f"{peak['dtype']} {peak['tflop_per_s'][0]:.3g}{_range(peak['tflop_per_s'], '.3g')}"
        for peak in found["peaks"].values()
    ]
    lines = [
        f"\n{found['machine']}, torch {found['torch']}, load average {found['load_average']:.2f}",
        f"{found['arch']}, {found['image_size']} pixels, {found['gflop_per_image']:.2f} GFLOP an image, "
        f"batches of {found['batch_size']}; medians of {found['rounds']} rounds of {found['report_every']} "
        "steps (range)",
        f"peak of products, TFLOP/s: {', '.join(peaks)}",
        f"{'':<16}{'images/s':>9}{'':18}{'ratio':>7}{'':14}{'TFLOP/s':>8}{'of peak':>9}{'waiting':>9}"
        f"{'MB':>8}{'compiling':>11}{'start':>8}",
    ]
    for row in found["rows"]:
        rate, ratio = row["images_per_s"], row["ratio"]
        compiling = "-" if row["compile_s"] is None else f"{row['compile_s']:.1f} s"
        lines.append(
            f"{row['name']:<16}{rate[0]:>9.1f}{_range(rate, '.1f'):<18}{ratio[0]:>6.2f}x"
            f"{_range(ratio, '.2f'):<14}{row['tflop_per_s'][0]:>8.3g}{row['share_of_peak'][0]:>9.1%}"
            f"{row['waiting']:>9.1%}{row['memory_mb']:>8.0f}{compiling:>11}{row['start_s']:>6.1f} s"
        )
    return "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    return f" ({values[1]:{form}}-{values[2]:{form}})"


def plot(found: dict, path: str) -> None:
    """Bars of images/s with their ratios, as a PNG. Raises BadInput without matplotlib."""
    Figure = import_optional("matplotlib.figure", "--plot needs matplotlib", "matplotlib").Figure
    rows = found["rows"][::-1]
    rates = [row["images_per_s"] for row in rows]
    figure = Figure(figsize=(7, 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    reach = [[rate[0] - rate[1] for rate in rates], [rate[2] - rate[0] for rate in rates]]
    bars = axes.barh([row["name"] for row in rows], [rate[0] for rate in rates], xerr=reach)
    axes.bar_label(bars, [f"{row['ratio'][0]:.2f}x" for row in rows], padding=3)
    title = f"images/s of {found['arch']}, {found['image_size']} pixels, batches of {found['batch_size']}"
    axes.margins(x=0.12)  # for the last label
    axes.set_xlabel(title)
    axes.set_title(found["machine"], fontsize="small")
    figure.savefig(path)
