"""`make progress`: what the reader has solved, one bar per notebook, one line per exercise."""

from lib.exercises import MARKS, all_exercises, progress


def report():
    """The report as text."""
    exercises, statuses = all_exercises(), progress()
    lines = []
    for number in dict.fromkeys(id.split(".")[0] for id in exercises):
        group = [e for id, e in exercises.items() if id.split(".")[0] == number]
        solved = sum(statuses.get(e.id) == "right" for e in group)
        lines.append(
            f"\nnotebook {number}  {'█' * solved}{'░' * (len(group) - solved)}  {solved} of {len(group)}"
        )
        lines += [f"  {MARKS[statuses.get(e.id, 'open')]} {e.heading}" for e in group]
    total = sum(statuses.get(id) == "right" for id in exercises)
    return "\n".join([f"{total} of {len(exercises)} exercises solved", *lines])


if __name__ == "__main__":
    print(report())
