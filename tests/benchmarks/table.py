"""Format the results of `launch bench train` as a table."""


def format_table(found: dict) -> str:
    """Return the table. found: the object that `--json` prints."""
    peaks = [
        f"peak of {peak['dtype']}: {peak['tflop_per_s']:.3g} TFLOP/s ({peak['source']})"
        for peak in found["peaks"].values()
    ]
    lines = [
        f"\n{found['machine']}, torch {found['torch']}, load average {found['load_average']:.2f}",
        f"{found['arch']}, {found['image_size']} pixels, {found['gflop_per_image']:.2f} GFLOP an image, "
        f"batches of {found['batch_size']}; medians of {found['rounds']} rounds of {found['report_every']} "
        "steps (range)",
        *peaks,
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
