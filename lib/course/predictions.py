"""Write a number down before you measure: the ledger of the reader's predictions.

The ledger is the reader's own file (.reader/predictions.jsonl, ignored by git). With a guess of None the cell
still works and only shows the question.
"""

import datetime
import json
import statistics

from lib.course import progress

LEDGER = "predictions.jsonl"
FACTORS = (1.2, 2, 10)
_guesses: dict[str, tuple] = {}


def predict(key, question, guess=None, unit="µs"):
    """Save `guess`, a number, for `question`; `outcome(key, …)` compares it. Returns a line to show.

    Raises TypeError when guess is neither a number nor None, ValueError when it is not positive.
    """
    if guess is not None and (isinstance(guess, bool) or not isinstance(guess, (int, float))):
        raise TypeError(
            f"predict: guess must be a number of {unit}, or None; got {type(guess).__name__}"
        )
    if guess is not None and not guess > 0:
        raise ValueError(f"predict: guess must be more than 0 {unit}, got {guess}")
    _guesses[key] = (question, guess, unit)
    if guess is None:
        return f"○ {question}  Put your number ({unit}) in place of None before you run on."
    return f"● {question}  Your prediction: {guess:g} {unit}."


def outcome(key, result, where="measured here"):
    """Compare the result with the prediction `key` and write both to the ledger. Returns a line to show."""
    question, guess, unit = _guesses.get(key, (key, None, ""))
    if result is None:
        return f"– {question}  {where}."
    if guess is None:
        return f"○ {question}  It is {result:,.4g} {unit} ({where}); you made no prediction."
    ratio = guess / result
    entry = {
        "key": key,
        "question": question,
        "unit": unit,
        "guess": guess,
        "result": result,
        "ratio": ratio,
        "where": where,
        "date": datetime.date.today().isoformat(),
    }
    progress.append(LEDGER, json.dumps(entry, ensure_ascii=False))
    verdict = f"{max(ratio, 1 / ratio):.1f}× off"
    if 1 / 1.2 <= ratio <= 1.2:
        verdict = "exact" if guess == result else "within 20 %"
    return f"● {question}  You: {guess:g} {unit}; it is {result:,.4g} {unit} ({where}): {verdict}."


def ledger():
    """All predictions with an outcome, as dictionaries, oldest first; the last one of a key counts."""
    latest = {}
    for line in progress.read_lines(LEDGER):
        entry = json.loads(line)
        latest.pop(entry["key"], None)  # a new outcome moves its key to the end
        latest[entry["key"]] = entry
    return list(latest.values())


def plot_calibration():
    """Guess against result for every prediction in the ledger, on log axes; the diagonal is a perfect guess.

    Those of the notebook that has the last outcome are named. None where no prediction has an outcome yet.
    """
    import matplotlib.pyplot as plt

    entries = ledger()
    if not entries:
        return None
    notebook = entries[-1]["key"].partition(".")[0]
    mine = [e for e in entries if e["key"].partition(".")[0] == notebook]
    others = [e for e in entries if e not in mine]
    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    numbers = [n for e in entries for n in (e["guess"], e["result"])]
    low, high = min(numbers) / 2, max(numbers) * 2
    ax.fill_between(
        [low, high], [low / 2, high / 2], [low * 2, high * 2], alpha=0.15, label="within 2×"
    )
    ax.plot([low, high], [low, high], color="black", linewidth=1)
    for some, label, face in ((others, "other notebooks", "white"), (mine, notebook, "black")):
        if some:
            x, y = ([e[name] for e in some] for name in ("result", "guess"))
            style = {"color": "black", "markerfacecolor": face, "markersize": 5}
            ax.loglog(x, y, "o", label=label, **style)
    _name_beside(ax, mine)
    ax.set(xlabel="result, in its own unit", ylabel="your prediction, in the same unit")
    ax.set_title(f"predictions: {len(entries)}")
    ax.legend(loc="upper left", fontsize="small")
    return figure


def _name_beside(ax, entries):
    """Name points in a column to the right of the axes, in the order of their heights, a line to each."""
    for k, e in enumerate(sorted(entries, key=lambda e: -e["guess"])):
        ax.annotate(
            f"{e['key']}, {e['unit']}",
            (e["result"], e["guess"]),
            (1.03, 1 - (k + 0.5) / len(entries)),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def calibration():
    """One row (a dictionary) per notebook, then one for all: how many predictions are within FACTORS.

    No rows when there are no predictions with an outcome.
    """
    times_off = {}
    for entry in ledger():
        for name in (entry["key"].partition(".")[0], "all"):
            times_off.setdefault(name, []).append(max(entry["ratio"], 1 / entry["ratio"]))
    return [
        {"notebook": name, "predictions": len(off)}
        | {f"within {factor}×": sum(n <= factor for n in off) for factor in FACTORS}
        | {"median, times off": statistics.median(off)}
        for name, off in sorted(times_off.items())  # "all" is behind every number
    ]


def plot_ratios():
    """Prediction over result, for all in the ledger by notebook, on a log axis; 1 is a perfect guess."""
    import matplotlib.pyplot as plt

    entries = sorted(ledger(), key=lambda entry: entry["key"])
    numbers = [entry["key"].partition(".")[0] for entry in entries]
    ratios = [entry["ratio"] for entry in entries]
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    ax.axhspan(1 / 2, 2, alpha=0.15, label="within 2×")
    ax.axhline(1, color="black", linewidth=1)
    ax.semilogy([places[number] for number in numbers], ratios, "o", color="black", markersize=5)
    most = 2 * max([4, *ratios, *(1 / ratio for ratio in ratios)])
    ax.set(xlabel="notebook", ylabel="prediction / result", ylim=(1 / most, most))
    ticks = [t for t in (0.001, 0.01, 0.1, 0.5, 1, 2, 10, 100, 1000) if 1 / most <= t <= most]
    ax.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(-0.5, max(len(places), 1) - 0.5)
    ax.set_xticks(list(places.values()), labels=list(places))
    ax.legend(loc="upper right")
    return figure
