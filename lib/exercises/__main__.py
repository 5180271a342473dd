"""`make progress`: what the reader has solved, one bar per notebook, one line per exercise."""

from lib.exercises import MARKS, all_exercises, progress


def report():
    """The report as text."""
    exercises, done = all_exercises(), progress()
    lines = []
    for number in dict.fromkeys(id.split(".")[0] for id in exercises):
        mine = [e for id, e in exercises.items() if id.split(".")[0] == number]
        solved = sum(done.get(e.id) == "right" for e in mine)
        lines.append(
            f"\nnotebook {number}  {'█' * solved}{'░' * (len(mine) - solved)}  {solved} of {len(mine)}"
        )
        lines += [f"  {MARKS[done.get(e.id, 'open')]} {e.heading}" for e in mine]
    total = sum(done.get(id) == "right" for id in exercises)
    return "\n".join([f"{total} of {len(exercises)} exercises solved", *lines])


if __name__ == "__main__":
    print(report())
