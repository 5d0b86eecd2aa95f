// A stand-in for the driver's library: answers what the file named by FAKE_NVML says, read again at every question.
// Its words: uncorrected errors, row pending, row failed, Xid (given once per change of the file), clock in MHz, throttle
// bits, percent of use.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct State {
    unsigned long long errors = 0;
    unsigned pending = 0, failed = 0, xid = 0, clock = 0, throttle = 0, busy = 0;
};

State now() {
    State state;
    if (FILE* file = std::fopen(std::getenv("FAKE_NVML"), "r")) {
        if (std::fscanf(file, "%llu %u %u %u %u %u %u", &state.errors, &state.pending, &state.failed, &state.xid,
                        &state.clock, &state.throttle, &state.busy) != 7)
            state = State{};
        std::fclose(file);
    }
    return state;
}

int device;
unsigned told_xid;

struct Event {
    void* device;
    unsigned long long kind, data;
    unsigned gpu_instance, compute_instance;
};

constexpr int OK = 0, NOT_FOUND = 6, TIMEOUT = 10;

}  // namespace

extern "C" {

int nvmlInit_v2() { return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = &device;
    return index == 0 ? OK : NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
    *handle = &device;
    return std::strncmp(uuid, "GPU-", 4) == 0 ? OK : NOT_FOUND;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
    std::snprintf(text, size, "580.00");
    return OK;
}

int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) {
    *mhz = now().clock;
    return OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* bits) {
    *bits = now().throttle;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
    rates[0] = now().busy;
    rates[1] = 0;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(void*, int kind, int counter, unsigned long long* count) {
    *count = kind == 1 && counter == 0 ? now().errors : 0;
    return OK;
}

int nvmlDeviceGetRemappedRows(void*, unsigned* corrected, unsigned* uncorrected, unsigned* pending, unsigned* failed) {
    *corrected = *uncorrected = 0;
    *pending = now().pending;
    *failed = now().failed;
    return OK;
}

int nvmlEventSetCreate(void** set) {
    *set = &device;
    told_xid = now().xid;
    return OK;
}

int nvmlDeviceRegisterEvents(void*, unsigned long long kinds, void*) { return kinds & 0x8 ? OK : NOT_FOUND; }

int nvmlEventSetWait_v2(void*, Event* event, unsigned) {
    const unsigned xid = now().xid;
    if (xid == told_xid) return TIMEOUT;
    told_xid = xid;
    *event = Event{&device, 0x8, xid, 0, 0};
    return OK;
}

}  // extern "C"
