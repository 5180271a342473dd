"""Grade a folder of submitted notebooks: a CSV of all, and a page for each student.

    python -m lib.exercises.grade submissions [--only "00.3 01.3"] [--out grades] [--timeout 120] [--jobs 1]

A submission gives the source of its answers' cells, nothing else: its outputs, its other cells and its progress
count for nothing. What an answer needs of its page comes from the course's own notebook, and so does the check.
A capstone has no page, so what its answer needs comes from the student's own notebook.

    notebooks     cells of a notebook file; a page of the course, and which of its cells an answer needs
    submissions   whose file that is, which page it answers, and which cell answers which exercise
    fence         a process of its own: no network, nothing of the disk to write, limits
    attempt       inside the fence: runs the cells, checks the answer, reports under a key
    runs          outside: starts attempts, watches their time and memory, believes a report with its key
    report        the CSVs and the pages
    remarks       names in an answer that make it worth reading, and ops of the course that it takes
    term          the totals of several weeks in one CSV

No answer runs in the process that grades. In its own process an answer shares Python with the check, so one
that is written to deceive can do so; `remarks` says which answers a teacher should read.
"""
