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
    return f"● {question}  Your prediction: {_readable(guess)} {unit}."


def outcome(key, result, where="measured here"):
    """Compare the result with the prediction `key` and write both to the ledger. Returns a line to show."""
    question, guess, unit = _guesses.get(key, (key, None, ""))
    if result is None:
        return f"– {question}  {where}."
    if guess is None:
        return f"○ {question}  It is {_readable(result)} {unit} ({where}); you made no prediction."
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
    verdict = "within 20 %" if 1 / 1.2 <= ratio <= 1.2 else f"{max(ratio, 1 / ratio):.1f}× off"
    guess, result = _readable(guess), _readable(result)
    return f"● {question}  You: {guess} {unit}; it is {result} {unit} ({where}): {verdict}."


def _readable(number):
    """Four digits, but all of those before the point: 0.1235, 12.35, 8,388,608."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:,.4g}"


def ledger():
    """All predictions with an outcome, as dictionaries, oldest first; the last one of a key counts."""
    entries = [json.loads(line) for line in progress.read_lines(LEDGER)]
    return list({entry["key"]: entry for entry in entries}.values())


def plot_calibration():
    """Guess against result for every prediction in the ledger, on log axes; the diagonal is a perfect guess.

    None where no prediction has an outcome yet.
    """
    import matplotlib.pyplot as plt

    entries = ledger()
    if not entries:
        return None
    figure, ax = plt.subplots(figsize=(4.5, 4.2), layout="constrained")
    numbers = [n for e in entries for n in (e["guess"], e["result"])]
    low, high = min(numbers) / 2, max(numbers) * 2
    ax.fill_between(
        [low, high], [low / 2, high / 2], [low * 2, high * 2], alpha=0.15, label="within 2×"
    )
    ax.plot([low, high], [low, high], color="black", linewidth=1)
    ax.loglog([e["result"] for e in entries], [e["guess"] for e in entries], "o")
    for e in entries:
        ax.annotate(
            e["key"],
            (e["result"], e["guess"]),
            textcoords="offset points",
            xytext=(5, 4),
            fontsize=8,
        )
    ax.set(xlabel="result", ylabel="your prediction", title=f"{len(entries)} predictions")
    ax.legend(loc="upper left")
    return figure


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
