/* A libcuda.so.1 without a GPU, for tests: it prints what cuda.bindings passes on, read by the
 * structures of CUDA's own header. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const size_t sizes[] = {8, 4, 4, 8, 8}; /* of the kernel's parameters */
static __thread int has_context;
static int num_nodes;

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    char longer[100];
    snprintf(longer, sizeof longer, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, longer);
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) puts("per-thread streams");
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "some text"; return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)0xc0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    has_context = 1;
    printf("enter context %p\n", context);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("load %s\n", (const char *)image);
    *module = (CUmodule)0x10;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    printf("function %s of %p\n", name, module);
    *function = (CUfunction)0xf0;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES   ? 512
                                                                  : -1;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("%p attribute %d = %d\n", function, attribute, value);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    printf("%p cache %d\n", function, config);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    if (index >= sizeof sizes / sizeof *sizes) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0, *size = sizes[index];
    return CUDA_SUCCESS;
}

static void print_parameters(void **parameters) {
    for (size_t index = 0; index < sizeof sizes / sizeof *sizes; index++) {
        unsigned long long value = 0;
        memcpy(&value, parameters[index], sizes[index]);
        printf(" %llx", value);
    }
    puts("");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p", function, config->gridDimX,
           config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
           config->blockDimZ, config->sharedMemBytes, config->hStream);
    for (unsigned index = 0; index < config->numAttrs; index++)
        printf(" attribute %d %d", config->attrs[index].id,
               config->attrs[index].value.programmaticStreamSerializationAllowed);
    print_parameters(parameters);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *shape, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("map type %d of %d at %p shape", type, rank, address);
    for (unsigned axis = 0; axis < rank; axis++) printf(" %lu", shape[axis]);
    printf(" strides");
    for (unsigned axis = 0; axis + 1 < rank; axis++) printf(" %lu", strides[axis]);
    printf(" box");
    for (unsigned axis = 0; axis < rank; axis++) printf(" %u", box[axis]);
    printf(" steps");
    for (unsigned axis = 0; axis < rank; axis++) printf(" %u", steps[axis]);
    printf(" swizzle %d promotion %d fill %d\n", swizzle, promotion, fill);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("map moved to %p\n", address);
    return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
    *graph = (CUgraph)0x60;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after,
                                 size_t num_after, const CUDA_KERNEL_NODE_PARAMS *one) {
    *node = (CUgraphNode)(size_t)++num_nodes;
    printf("node %p of %p: %p grid %u %u %u block %u %u %u shared %u", *node, graph, one->func,
           one->gridDimX, one->gridDimY, one->gridDimZ, one->blockDimX, one->blockDimY,
           one->blockDimZ, one->sharedMemBytes);
    print_parameters(one->kernelParams);
    return CUDA_SUCCESS;
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                   const CUgraphEdgeData *edge, size_t count) {
    printf("%zu edge %p %p port %d type %d\n", count, *from, *to, edge->from_port, edge->type);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags) {
    printf("instantiate %p flags %llu\n", graph, flags);
    *made = (CUgraphExec)0xe0;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec made, CUgraphNode node,
                                           const CUDA_KERNEL_NODE_PARAMS *one) {
    printf("change %p in %p:", node, made);
    print_parameters(one->kernelParams);
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec made, CUstream stream) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    printf("launch graph %p stream %p\n", made, stream);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec made) { return CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { return CUDA_SUCCESS; }

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    static CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUstreamCaptureMode before = current;
    current = *mode;
    printf("capture mode %d\n", current);
    *mode = before;
    return CUDA_SUCCESS;
}
