#include "../../cuda_on_cpu.h"
#include "../../groups.h"
