/* libnvidia-ml.so.1, which torch asks once a segment may grow: no GPU is in a fabric. */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return *device = "", 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) {
    return *count = 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *found) { return 3; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
