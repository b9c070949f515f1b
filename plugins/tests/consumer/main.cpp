#include <dspark/plugins.h>
#include <dspark/status.h>

#include <cstdio>

// Prints with how many TensorRTs the plugins are registered: none is loaded here.
int main() { std::printf("%s, %d\n", dspark::status_text(dspark::Status::ok), dspark_plugins_init()); }
