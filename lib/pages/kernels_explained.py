"""What the lines of kernels mean: the tables of notebooks 06 and 07, filled in from the text at hand.

wrapper(text)              # the function that checks, allocates and launches
decorator(text)            # what the decorator says about the loop nest
beside_yours(yours, text)  # notebook 03's flat_kernel and the compiler's kernel, line by line
persistent(source)         # a reduction whose tile is as long as a row
looped(source)             # a reduction that walks along the row
beside_softmax(yours)      # notebook 07's tiles_kernel and the kernel that ships, line by line
"""

import inspect

from lib.course.reading import beside, explain
from lib.ops import softmax

_WRAPPER = {
    r"\w+, \w+ = args": "the inputs, in the order in which the function first uses them: x, bias",
    r"args\.clear\(\)": "drop the list, so that each input can be freed after its last use",
    r"assert_size_stride.*arg0_1.*": "x must have this shape and these strides; the kernel relies on it",
    r"with torch\.cuda\._DeviceGuard.*": "launch on the GPU that holds the inputs",
    r"arg0_1 = copy_if_misaligned.*": "copy x if its address is no multiple of 16",
    r"buf0 = empty_strided_cuda.*": "memory for y, not filled",
    r"\w+ = get_raw_stream.*": "the stream, the queue into which launches go",
    r"triton_\w+\.run\(.*": "the launch: inputs, output, number of elements, stream",
    r"del arg0_1": "x is not needed any more",
    r"return \(buf0.*": "the outputs, always a tuple",
}

_DECORATOR = {
    r"@triton_heuristics\.\w+": "the kind of loop nest; pointwise: each element by itself",
    r"size_hints=\{.*?\}": "sizes, rounded up to a power of two; they suggest which tile lengths to try",
    r"\(0,\): \[\['tt\.divisibility', 16\]\]": "argument 0's address is a multiple of 16: loads may be wide",
    r"'grid_type': '\w+'": "one-dimensional: as many programs as tiles of XBLOCK cover the elements",
    r"'kernel_name': '\w+'": "poi: pointwise (red, per: reductions); then the fused ops; then a number",
}

# A pattern in the reader's kernel, one in the compiler's, and a remark.
_BESIDE = (
    (
        r"n_elements, n_cols",
        r"xnumel = \d+",
        "sizes are arguments in yours. Here they are numbers: this kernel serves one size",
    ),
    (
        r"tl\.program_id.*BLOCK_SIZE(?= \+)",
        r"xoffset = .*",
        "where the tile begins. Yours counts in int64, for more than 2³¹ elements",
    ),
    (r"tl\.arange\(0, BLOCK_SIZE\)", r"xindex = .*", "the tile: consecutive numbers"),
    (r"mask = offsets.*", r"xmask = .*", "which of them exist. Here all do, so there is no mask"),
    (r"x = tl\.load.*", r"tmp0 = .*", "x; None stands where a mask would"),
    (r"offsets % n_cols", r"x\d = \(xindex % 512\)", "the column, so the place in bias"),
    (
        r"bias = tl\.load.*",
        r"tmp1 = .*",
        "bias; evict_last: keep it in cache, other programs read it again",
    ),
    (r"z = .*", r"tmp2 = .*", "the sum, in registers"),
    (None, r"tmp\d = tl\.full\(\[1\], 0.*", "the 0 of ReLU, a constant"),
    (
        r"y = tl\.where\(.*?\)",
        r"tmp\d = \w+\.maximum.*",
        "ReLU. Both keep NaN: yours by a comparison, the compiler's by asking for it",
    ),
    (r"tl\.store.*", r"tl\.store.*", "y, the only thing that is written"),
)

_PERSISTENT = {
    r"^ +R0_BLOCK: tl\.constexpr = \d+": "the tile is as long as a row",
    r"xindex = .*": "the rows of this program, (XBLOCK, 1)",
    r"xmask = xindex < xnumel": "64 rows need not be a multiple of XBLOCK: a mask",
    r"r0_index = .*": "the columns, (1, R0_BLOCK)",
    r"r0_mask = .*": "all of them exist",
    r"tmp0 = tl\.load.*": "(XBLOCK, R0_BLOCK) elements of x, loaded once",
    r"tmp\d+ = tl\.load\(in_ptr1.*": "weight; evict_last again, because every row needs it",
    r"tmp\d+ = tl\.where.*": "rows that do not exist add 0",
    r"tmp\d+ = tl\.sum.*": "one number per row",
    r"tmp\d+ = libdevice\.rsqrt.*": "from here on a number per row and a row meet by broadcasting",
    r"tl\.store.*": "the normalised row",
}

_LOOPED = {
    r"_tmp\d+ = tl\.full.*": "running sums, a tile of them: a name with _ does change",
    r"for r0_offset in .*": "walk along the row",
    r"tmp\d+ = tl\.load\(in_ptr0.*evict_last.*": "x, first time; keep it in cache",
    r"_tmp\d+ = tl\.where.*": "add, but not beyond the end of the row",
    r"tmp\d+ = tl\.sum.*": "after the loop: add up the tile",
    r"tmp\d+ = tl\.load\(in_ptr0.*evict_first.*": "x, second time; this was its last use, let it go",
    r"tl\.store.*": "inside the second loop",
}

_SOFTMAX = (
    (
        r"rows = \(tl.*",
        r"rows, place = .*",
        "the rows of this program. place says which of their columns are there, as the masks do in yours",
    ),
    (
        r"x_rows, y_rows, .*",
        r"x_rows = .*",
        "a row may begin anywhere, and a load of 16 bytes may not: it begins `shift` columns before the row",
    ),
    (r"x = tl\.load.*", r"xs = device\.load_tiles.*", "all loads, of V numbers each: 16 bytes"),
    (
        None,
        r"x = _scored.*",
        "does what attention does with scores before softmax: scales them, and leaves out columns. "
        "COMPUTE is the type to calculate in, float64 for float64 tensors",
    ),
    (
        r"held = held \+.*",
        r"held = held \+.*",
        "a load of 16 bytes brings neighbours' numbers: -inf takes their place",
    ),
    (r"top = tl\.max.*", r"top = tl\.max.*", "the same"),
    (r"numerator = .*", r"numerator = .*", "fewer instructions than tl.exp"),
    (r"total = tl\.sum.*", r"total = tl\.sum.*", "the same"),
    (r"numerators\[t\] / total", r"numerators\[t\] \* .*", "one division a row, not one a number"),
    (r"tl\.store.*", r"device\.store_tile.*", "16 bytes at a time, and only the row's own columns"),
)


def wrapper(text):
    """The lines of the wrapper; the copy of a misaligned input is there from PyTorch 2.15 on."""
    absent = () if "copy_if_misaligned" in text else (r"arg0_1 = copy_if_misaligned.*",)
    return explain(text, {line: says for line, says in _WRAPPER.items() if line not in absent})


def decorator(text):
    """The entries of the decorator that matter."""
    return explain(text, _DECORATOR)


def beside_yours(yours, source):
    """The reader's kernel (a Triton function) and the compiler's (its text), line by line."""
    return beside(inspect.getsource(yours.fn), source, _BESIDE)


def persistent(source):
    """The lines of RMS norm's kernel for rows that fit into a tile."""
    return explain(source, _PERSISTENT)


def looped(source):
    """The lines of RMS norm's kernel for long rows."""
    return explain(source, _LOOPED)


def beside_softmax(yours):
    shipped = inspect.getsource(softmax._softmax_fwd_kernel.fn)
    return beside(inspect.getsource(yours.fn), shipped, _SOFTMAX, ("yours", "the shipped kernel's"))
