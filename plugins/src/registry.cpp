// The library's entry points: all that it exports.
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "block_attention_plugin.h"
#include "dspark/plugins.h"
#include "markov_argmax_plugin.h"
#include "messages.h"
#include "tensorrt_abi.h"

#define DSPARK_EXPORT extern "C" __attribute__((visibility("default")))

using namespace dspark;
using nvinfer1::IPluginCreatorInterface;

namespace {

constexpr int CREATORS = 2;

IPluginCreatorInterface* const* creators() {
    static Creator<BlockAttentionPlugin> block_attention;
    static Creator<MarkovArgmaxPlugin> markov_argmax;
    static IPluginCreatorInterface* const all[CREATORS] = {&block_attention, &markov_argmax};
    return all;
}

// Registers all creators with one loaded library of TensorRT's, unless they are there.
bool register_with(void* library) {
    const auto find = symbol<Registry*()>(library, "getPluginRegistry");
    Registry* registry = find == nullptr ? nullptr : find();
    if (registry == nullptr) return false;
    // Not getCreator: it logs an error where there is none.
    int32_t count = 0;
    IPluginCreatorInterface* const* there = registry->getAllCreators(&count);
    bool all = true;
    for (int i = 0; i < CREATORS; i++) {
        IPluginCreatorInterface* creator = creators()[i];
        if (there != nullptr && std::find(there, there + count, creator) != there + count) continue;
        if (registry->registerCreator(*creator, PLUGIN_NAMESPACE)) {
            there = registry->getAllCreators(&count);
        } else {
            report("TensorRT refuses the plugins: it has some of these names already");
            all = false;
        }
    }
    return all;
}

// dl_iterate_phdr's callback: notes the libraries of TensorRT's. Python loads them in private, so that they are not to
// be found by their symbols alone.
int note_tensorrt(dl_phdr_info* info, size_t, void* noted) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const std::string name = slash == nullptr ? info->dlpi_name : slash + 1;
    for (const char* known : {"libnvinfer.so", "libnvinfer_lean.so", "libnvinfer_dispatch.so", "libtensorrt_rtx.so"}) {
        if (name.rfind(known, 0) == 0) static_cast<std::vector<std::string>*>(noted)->push_back(info->dlpi_name);
    }
    return 0;
}

}  // namespace

// TensorRT calls these two when its registry loads the library.
DSPARK_EXPORT IPluginCreatorInterface* const* getCreators(int32_t& count) {
    count = CREATORS;
    return creators();
}

DSPARK_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { add_logger_finder(finder); }

// For programs that only load the library (ctypes, dlopen) instead: registers with every TensorRT in the process.
// Returns with how many the plugins are registered now; 0: there is none. May be called again.
DSPARK_EXPORT int32_t dspark_plugins_init() {
    std::vector<std::string> paths;
    dl_iterate_phdr(note_tensorrt, &paths);
    int32_t registered = 0;
    for (const std::string& path : paths) {
        void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (library == nullptr) continue;
        if (!speaks_11(library)) {
            report("%s is older than TensorRT 11 and TensorRT-RTX 1.5: let its registry load this library",
                   path.c_str());
        } else {
            add_logger_of(library);
            registered += register_with(library) ? 1 : 0;
        }
        dlclose(library);
    }
    return registered;
}

// For tools that load a library and call nothing, as Polygraphy's --plugins: DSPARK_PLUGINS_INIT=1. Not always, since a
// registry refuses to load a library whose plugins it has.
__attribute__((constructor)) static void init_where_asked() {
    const char* asked = std::getenv("DSPARK_PLUGINS_INIT");
    if (asked != nullptr && std::strcmp(asked, "1") == 0) dspark_plugins_init();
}
