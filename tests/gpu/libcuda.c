/* A stand-in for the CUDA driver's library, of which two GPUs are host memory and every call is carried out at once.
 *
 * It answers what cuda.core and cuda.bindings ask of the driver, and is strict where the driver is: a stream, an event
 * and the current context must belong together, a stream or memory must exist. Kernels are carried out by a function
 * that the test sets with stub_on_launch. Whatever is not here does not exist, as in an old driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long ptr;
typedef struct { int device; } context;
typedef struct { context *of; int alive; } stream;
typedef struct { context *of; int recorded, timed, alive; double at; } event;
typedef struct { int number; } library;
typedef struct { library *of; char name[1024]; } kernel;
typedef struct { unsigned grid[3], block[3], shared; stream *on; void *attributes; unsigned count; } launch;
typedef struct {
    size_t sx, sy; int stype; const void *shost; ptr sdev; void *sarray; size_t spitch;
    size_t dx, dy; int dtype; void *dhost; ptr ddev; void *darray; size_t dpitch;
    size_t width, height;
} rows;

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };

static context contexts[2] = {{0}, {1}};
static __thread context *current;
static int libraries, peers[2][2], opened[2][2];
static void (*on_launch)(int, const char *, void **, unsigned, unsigned);
static long live_memory, live_events;

void stub_on_launch(void *fn) { on_launch = fn; }
long stub_live(int what) { return what == 0 ? live_memory : live_events; }

int stub_opened(int of, int to) { return opened[of][to]; }

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static context *of(stream *s) { return (uintptr_t)s <= 2 ? current : s->of; }
static int bad(stream *s) { return (uintptr_t)s > 2 && !s->alive; }
static int here(stream *s) { return !bad(s) && current && of(s) == current; }

int cuGetProcAddress_v2(const char *name, void **fn, int version, uint64_t flags, int *status) {
    char plain[256]; void *self = dlopen(NULL, RTLD_LAZY); Dl_info info; (void)version; (void)flags; (void)self;
    dladdr((void *)cuGetProcAddress_v2, &info);
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    snprintf(plain, sizeof plain, "%s", name);
    *fn = dlsym(library, plain);
    if (status) *status = *fn ? 0 : 1;
    return *fn ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *name, void **fn, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, fn, version, flags, NULL);
}
int cuGetErrorName(int e, const char **s) { static char t[64]; snprintf(t, 64, "CUDA_ERROR_%d", e); *s = t; return OK; }
int cuGetErrorString(int e, const char **s) { return cuGetErrorName(e, s); }
int cuInit(unsigned f) { (void)f; return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuDeviceGetCount(int *n) { *n = 2; return OK; }
int cuDeviceGet(int *d, int k) { *d = k; return k >= 0 && k < 2 ? OK : 101; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "stand-in %d", d); return OK; }
int cuDeviceGetUuid(char *u, int d) { /* each worker of an MPI has GPUs of its own */
    const char *rank = getenv("PMI_RANK"); memset(u, d, 16); u[15] = rank ? atoi(rank) : 0; return OK;
}
int cuDeviceGetUuid_v2(char *u, int d) { return cuDeviceGetUuid(u, d); }
int cuDeviceGetAttribute(int *v, int what, int d) {
    (void)d; *v = what == 75 ? 9 : what == 76 ? 0 : what == 16 ? 4 : what == 115 ? 1 : 0; return OK;
}
int cuDevicePrimaryCtxRetain(context **c, int d) { *c = &contexts[d]; return OK; }
int cuDevicePrimaryCtxRelease(int d) { (void)d; return OK; }
int cuCtxGetCurrent(context **c) { *c = current; return OK; }
int cuCtxSetCurrent(context *c) { current = c; return OK; }
int cuCtxPushCurrent(context *c) { current = c; return OK; }
int cuCtxPopCurrent(context **c) { *c = current; return OK; }
int cuCtxGetDevice(int *d) { if (!current) return INVALID_CONTEXT; *d = current->device; return OK; }
int cuCtxGetStreamPriorityRange(int *low, int *high) { *low = *high = 0; return current ? OK : INVALID_CONTEXT; }
int cuCtxEnablePeerAccess(context *peer, unsigned f) {
    if (!current || f || peer == current) return INVALID_VALUE;
    if (peers[current->device][peer->device]) return 704;
    peers[current->device][peer->device] = 1; return OK;
}
int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }

int cuStreamCreateWithPriority(stream **s, unsigned flags, int priority) {
    if (!current || flags != 1 || priority) return INVALID_VALUE;
    *s = malloc(sizeof **s); (*s)->of = current; (*s)->alive = 1; return OK;
}
int cuStreamCreate(stream **s, unsigned flags) { return cuStreamCreateWithPriority(s, flags | 1, 0); }
int cuStreamDestroy(stream *s) { if (bad(s)) return INVALID_HANDLE; s->alive = 0; return OK; }
int cuStreamGetCtx(stream *s, context **c) { if (bad(s)) return INVALID_HANDLE; *c = of(s); return OK; }
int cuStreamGetFlags(stream *s, unsigned *f) { *f = 1; return bad(s) ? INVALID_HANDLE : OK; }
int cuStreamIsCapturing(stream *s, int *on) { *on = 0; return bad(s) ? INVALID_HANDLE : OK; }
int cuStreamSynchronize(stream *s) { return bad(s) ? INVALID_HANDLE : OK; }
int cuStreamWaitEvent(stream *s, event *e, unsigned f) { return bad(s) || !e->alive || f ? INVALID_HANDLE : OK; }

int cuEventCreate(event **e, unsigned flags) {
    if (!current) return INVALID_CONTEXT;
    *e = calloc(1, sizeof **e); (*e)->of = current; (*e)->timed = !(flags & 2); (*e)->alive = 1; live_events++; return OK;
}
int cuEventRecord(event *e, stream *s) {
    if (!e->alive || bad(s) || e->of != of(s)) return INVALID_HANDLE;
    e->recorded = 1; e->at = now(); return OK;
}
int cuEventQuery(event *e) { return !e->alive ? INVALID_HANDLE : e->recorded ? OK : NOT_READY; }
int cuEventSynchronize(event *e) { return e->alive ? OK : INVALID_HANDLE; }
int cuEventDestroy(event *e) { if (!e->alive) return INVALID_HANDLE; e->alive = 0; live_events--; return OK; }
int cuEventElapsedTime(float *ms, event *a, event *b) {
    if (!a->timed || !b->timed || !a->recorded || !b->recorded) return INVALID_HANDLE;
    *ms = 1e3 * (b->at - a->at) + 1e-6; return OK;
}
int cuEventElapsedTime_v2(float *ms, event *a, event *b) { return cuEventElapsedTime(ms, a, b); }

int cuDeviceGetDefaultMemPool(void **pool, int d) { *pool = &contexts[d]; return OK; }
int cuDeviceGetMemPool(void **pool, int d) { *pool = &contexts[d]; return OK; }
int cuMemGetDefaultMemPool(void **pool, int *where, int type) { (void)type; *pool = &contexts[where[1]]; return OK; }
int cuMemGetMemPool(void **pool, int *where, int type) { return cuMemGetDefaultMemPool(pool, where, type); }
int cuMemPoolSetAccess(void *pool, const int *who, size_t n) {  /* each: kind of place, its number, flags */
    if (n != 1 || who[0] != 1 || who[2] != 3) return INVALID_VALUE;
    opened[((context *)pool)->device][who[1]] = 1; return OK;
}
int cuMemPoolGetAttribute(void *p, int a, void *v) { (void)p; (void)a; memset(v, 0, 8); return OK; }
int cuMemPoolSetAttribute(void *p, int a, void *v) { (void)p; (void)a; (void)v; return OK; }
int cuMemAllocFromPoolAsync(ptr *p, size_t n, void *pool, stream *s) {
    if (!n || bad(s) || pool != (void *)of(s)) return INVALID_VALUE;
    if (posix_memalign((void **)p, 512, n)) return 2;
    memset((void *)*p, 0xA5, n); live_memory++; return OK;
}
int cuMemFreeAsync(ptr p, stream *s) { if (bad(s)) return INVALID_HANDLE; free((void *)p); live_memory--; return OK; }
int cuMemcpyHtoDAsync(ptr to, const void *by, size_t n, stream *s) {
    if (!here(s)) return INVALID_CONTEXT; memcpy((void *)to, by, n); return OK;
}
int cuMemcpyDtoHAsync(void *to, ptr by, size_t n, stream *s) {
    if (!here(s)) return INVALID_CONTEXT;
    memcpy(to, (void *)by, n); return OK;
}
int cuMemHostAlloc(void **p, size_t n, unsigned flags) {
    return !current || flags != 1 || posix_memalign(p, 4096, n) ? INVALID_VALUE : OK;
}
int cuMemcpyDtoDAsync(ptr to, ptr by, size_t n, stream *s) {
    if (!here(s)) return INVALID_CONTEXT; memcpy((void *)to, (void *)by, n); return OK;
}
int cuMemcpyDtoH(void *to, ptr by, size_t n) { if (!current) return INVALID_CONTEXT; memcpy(to, (void *)by, n); return OK; }
int cuMemcpyPeerAsync(ptr to, context *toward, ptr by, context *from, size_t n, stream *s) {
    if (!here(s) || !toward || !from || toward == from) return INVALID_CONTEXT;
    memcpy((void *)to, (void *)by, n); return OK;
}
int cuMemcpy2DAsync(const rows *r, stream *s) {
    if (!here(s) || r->stype != 2 || r->dtype != 2 || r->sx || r->sy || r->dx || r->dy) return INVALID_VALUE;
    if (r->spitch < r->width || r->dpitch < r->width) return INVALID_VALUE;
    for (size_t i = 0; i < r->height; i++)
        memcpy((char *)r->ddev + i * r->dpitch, (char *)r->sdev + i * r->spitch, r->width);
    return OK;
}

int cuLibraryLoadData(library **l, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a; (void)b; (void)c; (void)d; (void)e; (void)f;
    if (memcmp(code, "\x7f" "ELF", 4)) return 200;
    *l = malloc(sizeof **l); (*l)->number = libraries++; return OK;
}
int cuLibraryUnload(library *l) { (void)l; return OK; }
int cuLibraryGetKernel(kernel **k, library *l, const char *name) {
    *k = malloc(sizeof **k); (*k)->of = l; snprintf((*k)->name, sizeof (*k)->name, "%s", name); return OK;
}
int cuKernelGetLibrary(library **l, kernel *k) { *l = k->of; return OK; }
int cuKernelGetFunction(kernel **f, kernel *k) { *f = k; return OK; }
int cuLaunchKernelEx(const launch *how, kernel *k, void **arguments, void **extra) {
    if (!here(how->on) || extra || how->count || how->shared) return INVALID_VALUE;
    if (how->grid[1] != 1 || how->grid[2] != 1 || how->block[1] != 1 || how->block[2] != 1) return INVALID_VALUE;
    if (on_launch) on_launch(k->of->number, k->name, arguments, how->grid[0], how->block[0]);
    return OK;
}

/* What Numba's own arrays ask for. */
int cuMemGetInfo(size_t *left, size_t *all) { *left = *all = 1ull << 33; return current ? OK : INVALID_CONTEXT; }
int cuMemAlloc(ptr *p, size_t n) {
    if (!current || !n) return INVALID_VALUE;
    *p = (ptr)aligned_alloc(256, (n + 255) / 256 * 256); live_memory++; return OK;
}
int cuMemFree(ptr p) { free((void *)p); live_memory--; return OK; }
int cuMemcpyHtoD(ptr to, const void *by, size_t n) { if (!current) return INVALID_CONTEXT; memcpy((void *)to, by, n); return OK; }
int cuCtxSynchronize(void) { return current ? OK : INVALID_CONTEXT; }
int cuPointerGetAttribute(void *v, int what, ptr p) {
    if (what != 1 || !p) return INVALID_VALUE;
    *(context **)v = current; return OK;
}
