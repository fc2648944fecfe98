"""One HTML page, with its pictures inside, from what `dualdecoder bench`, `eval` and `run --trace` wrote as JSON.

    report.py DIR [--output FILE]

DIR holds files NAME.json. Beside each, NAME.command says how it was made, and machine.txt says where; what is missing is
shown as unknown. Files are recognised by what is in them. A picture without data is left out, and the page says so.
"""

import argparse
import base64
import collections
import html
import io
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import matplotlib.ticker as ticker  # noqa: E402

MIB = 1 << 20
# Told apart by shape and by darkness, so that they can be read in grey.
STYLES = {
    "previous": {"color": "#1b4f9c", "marker": "o", "linestyle": "-"},
    "dual": {"color": "#d1603d", "marker": "s", "linestyle": "--"},
    "reactive": {"color": "#6b8e23", "marker": "^", "linestyle": "-."},
    "last-set": {"color": "#8a6bbf", "marker": "v", "linestyle": ":"},
    "previous-layer": {"color": "#b8860b", "marker": "D", "linestyle": (0, (5, 1, 1, 1))},
    "oracle": {"color": "#999999", "marker": "P", "linestyle": (0, (1, 1))},
    "libllama": {"color": "#111111", "marker": "x", "linestyle": (0, (6, 2))},
    "dualdecoder": {"color": "#1b4f9c", "marker": "o", "linestyle": "-"},
    "llama.cpp": {"color": "#111111", "marker": "x", "linestyle": (0, (6, 2))},
    "dense": {"color": "#555555", "marker": "*", "linestyle": (0, (3, 1))},
}
PASS_ORDER = ["project", "append", "select", "arrive", "attend", "predict", "finish", "retire"]
PASS_COLORS = dict(zip(PASS_ORDER, ["#1b4f9c", "#88aadd", "#c2a000", "#b03030", "#f0b070", "#5c8a3c", "#30304f",
                                    "#aaaaaa"]))


class Source:
    """One JSON file and how it was made."""

    def __init__(self, path):
        self.name = path.name
        self.data = json.loads(path.read_text())
        command = path.with_suffix(".command")
        self.command = command.read_text().strip() if command.exists() else "command unknown"
        rows = self.data if isinstance(self.data, list) else []
        self.commits = sorted({row["commit"] for row in rows if isinstance(row, dict) and "commit" in row})

    def rows(self, *columns):
        if not isinstance(self.data, list):
            return []
        return [row for row in self.data if all(column in row for column in columns)]


def read_sources(directory):
    sources, broken = [], []
    for path in sorted(directory.glob("*.json")):
        try:
            sources.append(Source(path))
        except ValueError as error:
            broken.append(f"{path.name}: not JSON ({error})")
    return sources, broken


def style(name):
    return STYLES.get(name, {"color": "#777777", "marker": ".", "linestyle": "-"})


def series_name(row):
    return "libllama" if row["engine"] == "libllama" else row["policy"]


def label(row):
    if row["engine"] == "libllama":
        return "libllama, all KV in RAM"
    where = row["far"].split(":")[0]
    attends = ", resident" if row.get("attend") == "resident" else ""
    return row["policy"] if where == "none" else f"{row['policy']}{attends}, far {where}"


def decode_rows(sources):
    for source in sources:
        for row in source.rows("tokens_per_s", "engine", "context"):
            if row["test"].startswith("tg"):
                yield source, row


def new_axes(x, y, width=6.4, height=3.9):
    figure, axes = plt.subplots(figsize=(width, height), dpi=130, layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def plot_lines(axes, lines):
    """lines: label -> (style name, [(x, y)]); of equal x the last one counts."""
    for text, (name, points) in sorted(lines.items()):
        xs, ys = zip(*sorted(dict(points).items()))
        axes.plot(xs, ys, label=text, markersize=6, linewidth=1.6, **style(name))
    axes.legend(frameon=False, fontsize=8)


def throughput(sources, x_column, fixed_column, x_label, title):
    """A picture for each value of the column that is held, where the other one takes several values."""
    groups = collections.defaultdict(lambda: collections.defaultdict(lambda: [None, []]))
    used = collections.defaultdict(dict)
    for source, row in decode_rows(sources):
        if "frontier" in source.name:
            continue
        line = groups[row[fixed_column]][label(row)]
        line[0] = series_name(row)
        line[1].append((row[x_column], row["tokens_per_s"]))
        used[row[fixed_column]][source.name] = source
    for fixed, lines in sorted(groups.items()):
        if len({x for _, points in lines.values() for x, _ in points}) < 2:
            continue
        figure, axes = new_axes(x_label, "tokens/s, all sequences")
        plot_lines(axes, lines)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.set_xticks(sorted({x for _, points in lines.values() for x, _ in points}))
        yield title.format(fixed), figure, list(used[fixed].values())


def frontier(sources):
    lines, used = collections.defaultdict(lambda: [None, []]), {}
    for source, row in decode_rows(sources):
        if "frontier" not in source.name:
            continue
        line = lines[label(row)]
        line[0] = series_name(row)
        line[1].append((row["near_kv_bytes"] / row["sequences"] / MIB, row["tokens_per_s"] / row["sequences"]))
        used[source.name] = source
    if not lines:
        return
    figure, axes = new_axes("near KV of a sequence, MiB", "tokens/s of a sequence")
    plot_lines(axes, lines)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    yield "Throughput against near memory", figure, list(used.values())


def memory(sources):
    for source in sources:
        rows = [row for row in source.rows("near_kv_bytes", "far_kv_bytes") if row["test"].startswith("tg")]
        if len({row["engine"] for row in rows}) < 2:
            continue
        depth, sequences = max((row["context"], row["sequences"]) for row in rows)
        rows = [row for row in rows if (row["context"], row["sequences"]) == (depth, sequences)]
        figure, axes = new_axes("MiB", "", height=1.4 + 0.6 * len(rows))
        for place, row in enumerate(reversed(rows)):
            near, far = row["near_kv_bytes"] / MIB, row["far_kv_bytes"] / MIB
            axes.barh(place + 0.19, near, height=0.34, color="#30304f", label="near" if place == 0 else None)
            axes.barh(place - 0.19, far, height=0.34, color="#c8c8d8", edgecolor="#777777", hatch="//",
                      label="far" if place == 0 else None)
            for offset, value in ((0.19, near), (-0.19, far)):
                axes.text(value, place + offset, f" {value:,.0f}" if value >= 10 else f" {value:.1f}", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [label(row) for row in reversed(rows)])
        axes.legend(frameon=False, fontsize=8)
        axes.margins(x=0.12)
        yield f"KV memory, {sequences} x {depth:,} tokens", figure, [source]
        return


def whole_step(events):
    """Of the steps that have all passes, the one of median length: its events, by track."""
    steps = collections.defaultdict(list)
    for event in events:
        # "begin" still has the number of the step before.
        if event.get("ph") == "X" and event["tid"] == 0 and "step" in event.get("args", {}) and event["name"] != "begin":
            steps[event["args"]["step"]].append(event)
    whole = [number for number, found in steps.items() if any(event["name"] == "finish" for event in found)]
    if not whole:
        return None
    length = {at: max(event["ts"] + event["dur"] for event in steps[at]) - min(event["ts"] for event in steps[at]) for at in whole}
    number = sorted(whole, key=length.get)[len(whole) // 2]
    start = min(event["ts"] for event in steps[number])
    end = max(event["ts"] + event["dur"] for event in steps[number])
    reads = [event for event in events if event.get("ph") == "X" and event["tid"] == 1 and event["ts"] < end
             and event["ts"] + event["dur"] > start]
    return number, start, end, steps[number], reads


def pack(reads):
    """Rows such that what overlaps in time stands in different ones."""
    rows = []
    for event in sorted(reads, key=lambda event: event["ts"]):
        for row in rows:
            if row[-1]["ts"] + row[-1]["dur"] <= event["ts"]:
                row.append(event)
                break
        else:
            rows.append([event])
    return rows


def timeline(sources):
    for source in sources:
        if not isinstance(source.data, dict) or "traceEvents" not in source.data:
            continue
        found = whole_step(source.data["traceEvents"])
        if found is None:
            continue
        number, start, end, passes, reads = found
        rows = pack(reads)
        figure, axes = new_axes(f"ms since step {number} began", "", width=9.6, height=2.2 + 0.04 * len(rows))
        seen = set()
        for event in passes:
            name = event["name"]
            axes.broken_barh([((event["ts"] - start) / 1e3, event["dur"] / 1e3)], (0, 0.9),
                             color=PASS_COLORS.get(name, "#777777"), label=name if name not in seen else None)
            seen.add(name)
        height = 0.9 / max(len(rows), 1)
        for level, row in enumerate(rows):
            for event in row:
                begin = max(event["ts"], start)
                stop = min(event["ts"] + event["dur"], end)
                demand = event["name"] == "demand"
                axes.broken_barh([((begin - start) / 1e3, (stop - begin) / 1e3)], (-1 - level * height, height * 0.8),
                                 color="#b03030" if demand else "#6a8fb5",
                                 label=f"read: {event['name']}" if event["name"] not in seen else None)
                seen.add(event["name"])
        axes.set_yticks([0.45, -0.55], ["compute", "reads in flight"])
        axes.set_xlim(0, (end - start) / 1e3)
        axes.grid(False, axis="y")
        axes.legend(frameon=False, fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.28))
        yield "One decode step (of median length): compute above, reads for the next one below", figure, [source]


def layer_recall(sources):
    for source in sources:
        # What `reactive` would have predicted is not what it does.
        rows = [row for row in source.rows("layer_recall") if row["policy"] != "reactive"]
        if not rows:
            continue
        figure, axes = new_axes("layer", "share of the token's own selection", width=7.2)
        for row in rows:
            look = {**style(row["policy"]), "markersize": 4}
            axes.plot(range(len(row["layer_recall"])), row["layer_recall"], linewidth=1.3,
                      label=f"{row['policy']} (mean {row['recall']:.3f})", **look)
        axes.set_ylim(top=1.005)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=8)
        yield "Recall: blocks that had been predicted, layer by layer", figure, [source]


def divergence(sources):
    for source in sources:
        rows = [row for row in source.rows("kl_mean", "budget", "positions") if "test" not in row]
        if len({row["budget"] for row in rows}) < 2:
            continue
        figure, axes = new_axes("budget, tokens beside the window", "mean KL to full attention, nats")
        lines = collections.defaultdict(lambda: [None, []])
        for row in rows:
            lines[row["policy"]][0] = row["policy"]
            lines[row["policy"]][1].append((row["budget"], row["kl_mean"]))
        plot_lines(axes, lines)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        budgets = sorted({row["budget"] for row in rows})
        axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        row = rows[0]
        yield f"Divergence against budget, {row['positions']} positions after {row['context']:,} tokens", figure, [source]


def heat_map(sources):
    for source in sources:
        rows = [row for row in source.rows("task", "depth", "accuracy") if row["depth"] is not None]
        for task in sorted({row["task"] for row in rows}):
            of_task = [row for row in rows if row["task"] == task]
            ways = list(dict.fromkeys((row["policy"], row["budget"]) for row in of_task))
            lengths = sorted({row["length"] for row in of_task})
            depths = sorted({row["depth"] for row in of_task})
            figure, all_axes = plt.subplots(1, len(ways), figsize=(1.2 + 2.7 * len(ways), 1.4 + 0.5 * len(depths)), dpi=130,
                                            layout="constrained", squeeze=False, sharey=True)
            for axes, (policy, budget) in zip(all_axes[0], ways):
                cells = [[float("nan")] * len(lengths) for _ in depths]
                for row in of_task:
                    if (row["policy"], row["budget"]) != (policy, budget):
                        continue
                    y, x = depths.index(row["depth"]), lengths.index(row["length"])
                    cells[y][x] = row["accuracy"]
                    axes.text(x, y, f"{row['right']}/{row['cases']}", ha="center", va="center", fontsize=9,
                              color="white" if row["accuracy"] < 0.5 else "black")
                image = axes.imshow(cells, vmin=0, vmax=1, cmap="gray", aspect="auto")
                axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
                axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths])
                axes.set_title("full attention" if policy == "full" else f"{policy}, budget {budget:,}" if budget else policy, fontsize=9)
                axes.set_xlabel("tokens")
            all_axes[0][0].set_ylabel("depth of the fact")
            figure.colorbar(image, ax=all_axes[0].tolist(), label="share right", shrink=0.9)
            model = pathlib.PurePath(of_task[0]["model"]).name
            yield f"Needles found: {task}, {model}", figure, [source]


def load_rows(sources):
    for source in sources:
        for row in source.rows("server", "clients", "prefix"):
            yield source, row


def servers(sources):
    """Decoding and the time to the first text against the number of clients, for each length of prompts."""
    groups, used = collections.defaultdict(list), collections.defaultdict(dict)
    for source, row in load_rows(sources):
        groups[row["prefix"], row["prompt_tokens"]].append(row)
        used[row["prefix"], row["prompt_tokens"]][source.name] = source
    for (prefix, prompt), rows in sorted(groups.items(), reverse=True):
        counts = sorted({row["clients"] for row in rows})
        if len(counts) < 2:
            continue
        figure, both = plt.subplots(1, 2, figsize=(9.6, 3.9), dpi=130, layout="constrained")
        for axes, column, scale, text in ((both[0], "decode_tokens_per_s", 1, "tokens/s, all clients"),
                                          (both[1], "first_text_ms_median", 1e3, "s to the first text, median")):
            for name in dict.fromkeys(row["server"] for row in rows):
                points = sorted((row["clients"], row[column] / scale) for row in rows if row["server"] == name and column in row)
                if points:
                    axes.plot(*zip(*points), label=name, markersize=6, linewidth=1.6, **style(name))
            axes.set(xlabel="clients", ylabel=text, xticks=counts)
            axes.set_ylim(bottom=0)
            axes.grid(True, color="#e4e4e4", linewidth=0.7)
            axes.legend(frameon=False, fontsize=8)
        yield f"Servers, prompts of {prompt:,} tokens, {prefix}", figure, list(used[prefix, prompt].values())


def server_table(sources):
    head = ["server", "clients", "prompt", "prefix", "first text s", "max", "ms between texts beside prompts", "p99",
            "ms between texts", "p99", "decode tokens/s", "× the first server", "peak memory MiB", "errors"]
    rows = []
    for _, row in load_rows(sources):
        rows.append([row["server"], row["clients"], f"{row['prompt_tokens']:,}", row["prefix"],
                     number(row, "first_text_ms_median", 1e3, 2), number(row, "first_text_ms_max", 1e3, 2),
                     number(row, "busy_gap_ms_median"), number(row, "busy_gap_ms_p99"), number(row, "gap_ms_median"),
                     number(row, "gap_ms_p99"), number(row, "decode_tokens_per_s"), number(row, "vs_first", digits=2),
                     number(row, "peak_bytes", MIB, 0), f"{row['errors']} of {row['requests']}"])
    return head, rows


def pictures(sources):
    yield from throughput(sources, "context", "sequences", "context of each sequence, tokens",
                          "Decoding against context, sequences: {}")
    yield from throughput(sources, "sequences", "context", "sequences decoded together",
                          "Decoding against concurrency, {:,} tokens each")
    for make in (servers, frontier, memory, timeline, layer_recall, divergence, heat_map):
        yield from make(sources)


def embed(figure):
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    plt.close(figure)
    return picture.getvalue()


def cell(text):
    return f"<td>{html.escape(str(text))}</td>"


def number(row, column, scale=1.0, digits=1):
    return f"{row[column] / scale:,.{digits}f}" if column in row else ""


def speed_table(sources):
    head = ["test", "sequences", "engine", "far", "policy", "tokens/s", "spread", "× libllama", "mean KL", "near KV MiB", "stall",
            "far MiB/token", "token hash"]
    rows = []
    for _, row in decode_rows(sources):
        stall = f"{row['stall_share']:.1%}" if "stall_share" in row else ""
        rows.append([row["test"], row["sequences"], row["engine"], row["far"].split(":")[0], row["policy"],
                     number(row, "tokens_per_s"), f"±{row['spread']:.0%}", number(row, "speedup", digits=2),
                     number(row, "kl_mean", digits=4), number(row, "near_kv_bytes", MIB), stall,
                     number(row, "far_read_bytes_per_token", MIB, 2), row.get("token_hash", "")])
    return head, rows


def lost_to_servers(sources):
    """Where another server did better than ours under the same load."""
    loads = collections.defaultdict(dict)
    for _, row in load_rows(sources):
        loads[row["clients"], row["prompt_tokens"], row["prefix"]][row["server"]] = row
    for (clients, prompt, prefix), rows in loads.items():
        ours = rows.get("dualdecoder")
        for name, row in rows.items():
            for column, text, more_is_better in (("decode_tokens_per_s", "decode tokens/s", True), ("gap_ms_p99", "ms p99 between texts", False),
                                                 ("busy_gap_ms_p99", "ms p99 between texts beside prompts", False),
                                                 ("first_text_ms_median", "ms to the first text", False)):
                if ours is None or row is ours or column not in row or column not in ours:
                    continue
                if row[column] > ours[column] if more_is_better else row[column] < ours[column]:
                    yield (f"{clients} clients, prompts of {prompt:,} tokens, {prefix}: {ours[column]:,.1f} {text}, {name} "
                           f"{row[column]:,.1f}")


def losses(sources):
    """Where a peer is faster, and where full attention answers better."""
    found = list(lost_to_servers(sources))
    for _, row in decode_rows(sources):
        if row.get("speedup", 1.0) < 1.0:
            found.append(f"{row['test']}, {row['sequences']} sequences, {label(row)}: {row['speedup']:.2f} times libllama")
    for source in sources:
        rows = source.rows("task", "right", "policy")
        full = {(row["task"], row["length"], row["depth"]): row for row in rows if row["policy"] == "full"}
        for row in rows:
            reference = full.get((row["task"], row["length"], row["depth"]))
            if reference and row["right"] < reference["right"]:
                depth = "" if row["depth"] is None else f" at {row['depth']} %"
                found.append(f"{row['task']}, {row['length']:,} tokens{depth}, {row['policy']} with budget {row['budget']:,}: "
                             f"{row['right']} of {row['cases']} right, full attention {reference['right']}")
    return found


STYLE = """body{font:15px/1.5 sans-serif;color:#222;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}img{max-width:100%}figure{margin:0}
figcaption,.small{color:#555;font-size:.8rem}code{overflow-wrap:anywhere}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.8rem;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .5rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}
@media print{.wide{overflow:visible}figure{break-inside:avoid}}"""


def page(directory, sources, broken):
    machine_file = directory / "machine.txt"
    machine = machine_file.read_text().strip() if machine_file.exists() else "machine unknown"
    out = ["<!doctype html><html lang=en><head><meta charset=utf-8><title>DualDecoder: measured</title>",
           f"<style>{STYLE}</style></head><body><h1>DualDecoder: measured</h1><p>{html.escape(machine)}</p>"]
    for line in broken:
        out.append(f"<p><b>Left out:</b> {html.escape(line)}</p>")
    for title, (head, rows) in (("Speed, and how close to full attention", speed_table(sources)),
                                ("Servers, as their clients see them", server_table(sources))):
        if not rows:
            continue
        out.append(f"<h2>{title}</h2><div class=wide><table><tr>")
        out += [f"<th>{html.escape(name)}</th>" for name in head]
        out.append("</tr>")
        out += ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
        out.append("</table></div>")
    out.append("<h2>Where we lose</h2>")
    lost = losses(sources)
    out.append("<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lost) + "</ul>" if lost
               else "<p>Nowhere in what was measured here.</p>")
    count = 0
    for title, figure, used in pictures(sources):
        count += 1
        picture = base64.b64encode(embed(figure)).decode()
        notes = "".join(f"<br><code>{html.escape(source.command)}</code> ({html.escape(source.name)}"
                        f"{', commit ' + ', '.join(source.commits) if source.commits else ''})" for source in used)
        out.append(f"<h2>{html.escape(title)}</h2><figure><img alt=\"{html.escape(title)}\" src=\"data:image/png;base64,{picture}\">"
                   f"<figcaption>{html.escape(machine)}{notes}</figcaption></figure>")
    if count == 0:
        out.append("<p>There was nothing to draw.</p>")
    out.append("</body></html>")
    return "\n".join(out), count


def main():
    parser = argparse.ArgumentParser(description="One HTML page from the JSON of bench, eval and run --trace.")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, help="DIR/report.html if not given")
    arguments = parser.parse_args()
    if not arguments.directory.is_dir():
        print(f"report: {arguments.directory} is no directory", file=sys.stderr)
        return 2
    sources, broken = read_sources(arguments.directory)
    if not sources:
        print(f"report: no JSON files in {arguments.directory}; `make bench` writes some", file=sys.stderr)
        return 2
    output = arguments.output or arguments.directory / "report.html"
    text, count = page(arguments.directory, sources, broken)
    try:
        output.write_text(text)
    except OSError as error:
        print(f"report: cannot write {output}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{output}: {count} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
