// PyTorch's own brings pybind11, which takes half a minute to compile and wants Python's headers.
#include <torch/library.h>
#include <torch/types.h>
