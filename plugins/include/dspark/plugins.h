// The entry point of libdspark_plugins.so for programs that link it or load it by hand.
//
// TensorRT's own ways need no header: IPluginRegistry::loadLibrary, or setPluginsToSerialize in the builder's config.
#pragma once

#include <cstdint>

// Registers the plugins BlockAttention and MarkovArgmax (namespace "dspark", version "1") with every TensorRT >= 11 or
// TensorRT-RTX >= 1.5 that is loaded into this process. Returns with how many they are registered now; 0: there is
// none. May be called again.
extern "C" int32_t dspark_plugins_init();
