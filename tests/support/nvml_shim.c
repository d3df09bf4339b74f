/* A shim of NVML for tests on machines without a GPU. It answers from a text file, which it reads at each call.
 *
 * $NVML_SHIM names the file. Lines: "gpus N", "GPU KEY VALUE" and "xid GPU CODE". A key that a GPU does not have is
 * answered with NVML_ERROR_NOT_SUPPORTED; "GPU lost 1" makes every call about it answer NVML_ERROR_GPU_IS_LOST.
 * Each xid line is one event, delivered once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15 };
typedef unsigned long long u64;
typedef struct { int index; } *Device;
typedef struct { Device device; u64 type, data; unsigned gi, ci; } Event;

static struct { int index; } devices[16];
static int delivered;
static FILE *state(void) { return fopen(getenv("NVML_SHIM"), "r"); }

/* Return whether a line "WHO KEY VALUE" exists, and its value. */
static int look(const char *who, const char *key, char *value) {
    char line[256], a[64], b[64];
    FILE *file = state();
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "%63s %63s %63s", a, b, value) == 3 && !strcmp(a, who) && !strcmp(b, key);
    if (file) fclose(file);
    return found;
}

static int text(Device gpu, const char *key, char *value) {
    char who[16];
    sprintf(who, "%d", gpu->index);
    if (look(who, "lost", value)) return LOST;
    return look(who, key, value) ? SUCCESS : NOT_SUPPORTED;
}

static int number(Device gpu, const char *key, u64 *value) {
    char found[64];
    int answer = text(gpu, key, found);
    if (!answer) *value = strtoull(found, 0, 0);
    return answer;
}

static int small(Device gpu, const char *key, unsigned *value) {
    u64 found;
    int answer = number(gpu, key, &found);
    if (!answer) *value = (unsigned)found;
    return answer;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    char line[256];
    FILE *file = state();
    *count = 0;
    while (file && fgets(line, sizeof line, file)) sscanf(line, "gpus %u", count);
    if (file) fclose(file);
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *gpu) {
    devices[index].index = (int)index;
    *gpu = (Device)&devices[index];
    return SUCCESS;
}
int nvmlDeviceGetUUID(Device gpu, char *uuid, unsigned length) {
    char found[64];
    int answer = text(gpu, "uuid", found);
    if (!answer) snprintf(uuid, length, "%s", found);
    return answer;
}
int nvmlDeviceGetTotalEccErrors(Device gpu, int type, int counter, u64 *count) {
    return type == 1 ? number(gpu, counter ? "ecc_aggregate" : "ecc_volatile", count) : NOT_SUPPORTED;
}
int nvmlDeviceGetRemappedRows(Device gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    *correctable = 0;
    if (small(gpu, "remap_pending", pending) || small(gpu, "remap_failed", failed)) *pending = *failed = 0;
    return small(gpu, "remapped_rows", uncorrectable);
}
int nvmlDeviceGetClockInfo(Device gpu, int type, unsigned *clock) { return small(gpu, type == 1 ? "sm_clock" : "memory_clock", clock); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device gpu, u64 *reasons) { return number(gpu, "event_reasons", reasons); }
int nvmlDeviceGetTemperature(Device gpu, int sensor, unsigned *celsius) { (void)sensor; return small(gpu, "temperature", celsius); }
int nvmlDeviceGetTemperatureThreshold(Device gpu, int type, unsigned *celsius) {
    return type == 1 ? small(gpu, "slowdown_temperature", celsius) : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(Device gpu, unsigned *milliwatts) { return small(gpu, "milliwatts", milliwatts); }
int nvmlDeviceGetMemoryInfo(Device gpu, u64 *memory) { /* total, free, used */
    return number(gpu, "memory_total", memory) || number(gpu, "memory_used", memory + 2) ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device gpu, unsigned *percent) { /* of kernels, of the memory's bus */
    percent[1] = 0;
    return small(gpu, "utilization", percent);
}
int nvmlDeviceGetCurrPcieLinkWidth(Device gpu, unsigned *width) { return small(gpu, "pcie_width", width); }
int nvmlDeviceGetMaxPcieLinkWidth(Device gpu, unsigned *width) { return small(gpu, "pcie_width_max", width); }
int nvmlDeviceGetNvLinkState(Device gpu, unsigned link, int *active) {
    char key[16];
    sprintf(key, "link%u", link);
    return small(gpu, key, (unsigned *)active);
}
int nvmlDeviceGetNvLinkErrorCounter(Device gpu, unsigned link, int counter, u64 *count) {
    char key[32];
    sprintf(key, "link%u_errors%d", link, counter);
    return number(gpu, key, count);
}
int nvmlDeviceGetSupportedEventTypes(Device gpu, u64 *types) { (void)gpu; *types = 8; return SUCCESS; }
int nvmlEventSetCreate(void **set) { *set = &delivered; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(Device gpu, u64 types, void *set) { (void)gpu; (void)types; (void)set; return SUCCESS; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    char line[256];
    int seen = 0, index;
    u64 code;
    FILE *file = state();
    struct timespec pause = {0, 20000000};
    (void)set; (void)milliseconds;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "xid %d %llu", &index, &code) == 2 && seen++ == delivered) {
            fclose(file);
            delivered++;
            *event = (Event){(Device)&devices[index], 8, code, 0, 0};
            return SUCCESS;
        }
    if (file) fclose(file);
    nanosleep(&pause, 0);
    return TIMEOUT;
}
