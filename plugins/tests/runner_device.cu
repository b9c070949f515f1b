// The runner with its buffers on a GPU.
#define DSPARK_DEVICE_RUNNER
#include "runner.cpp"
