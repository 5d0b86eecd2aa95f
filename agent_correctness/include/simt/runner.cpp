// Runs the launches of a job on a CPU, under the sanitizer that it was linked with. `runner UNIT.so JOB INPUT OUTPUT`
//
// The job is text, a record a line:
//   seed NUMBER PATTERN          order of threads (0: as numbered), what shared memory holds at first
//   buffer NAME BYTES OFFSET     in the order of the arguments' numbers; OFFSET of its content in INPUT
//   launch ENTRY GRID*3 BLOCK*3 CLUSTER*3 SHARED COOPERATIVE DEPENDENT COUNT ARGUMENT*COUNT
// An argument is b (a buffer's number), i (32 bits), l (64 bits) or f (a float's bits), then the value.
// OUTPUT gets all buffers, one after the other. Findings go to stderr as `simt: KIND: DETAIL`, beside the sanitizer's.
#include <string.h>

#include <fstream>
#include <iostream>

#include "simt/grid.hpp"

namespace simt {

Here* here = nullptr;

namespace {

struct Buffer {
  std::string name;
  size_t bytes;
  char* memory;
};
std::vector<Buffer> buffers;
Machine* machine = nullptr;

// "byte 4096 of the 4096 of x": the buffer that is nearest to an address.
void describe_address(FILE* to, const char* address) {
  const Buffer* nearest = nullptr;
  size_t least = 1 << 16;
  for (const Buffer& buffer : buffers) {
    const char* end = buffer.memory + buffer.bytes;
    const size_t apart = address < buffer.memory ? static_cast<size_t>(buffer.memory - address)
                         : address < end         ? 0
                                                 : static_cast<size_t>(address - end);
    if (apart < least) least = apart, nearest = &buffer;
  }
  if (machine->describe_shared(to, address)) return;
  if (nearest != nullptr) {
    fprintf(to, "byte %td of the %zu of %s", address - nearest->memory, nearest->bytes, nearest->name.c_str());
    return;
  }
  fputs("memory that is no buffer's", to);
}

}  // namespace

int block_barrier(bool predicate) { return static_cast<int>(machine->block_barrier(predicate)); }
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int source) {
  return machine->warp_operation(operation, mask, value, source);
}
void cluster_arrive() { machine->cluster_arrive(); }
void cluster_wait() { machine->cluster_wait(); }
void* in_block_of_cluster(void* place, unsigned rank) { return machine->in_block_of_cluster(place, rank); }
void* dynamic_shared_memory() { return machine->dynamic_shared(); }
Copy* room_for_copies() { return machine->room_for_copies(); }
void pause(bool wrote) { machine->pause(wrote); }
void wait_for_previous() { machine->wait_for_previous(); }

void fail(const char* kind, const char* detail) {
  fprintf(stderr, "simt: %s: %s; ", kind, detail);
  machine->describe_thread(stderr);
  fputc('\n', stderr);
  fflush(stderr);
  _exit(strcmp(kind, "unsupported") == 0 ? 4 : 1);
}

void Machine::body() {
  Fiber::begin();
  machine->run_thread();
}

}  // namespace simt

#ifdef SIMT_ADDRESS
// AddressSanitizer calls this before it reports.
extern "C" void __asan_on_error() {
  fprintf(stderr, "simt: out_of_bounds: %s %zu bytes at ", __asan_get_report_access_type() ? "writes" : "reads",
          __asan_get_report_access_size());
  simt::describe_address(stderr, static_cast<const char*>(__asan_get_report_address()));
  fputs("; ", stderr);
  simt::machine->describe_thread(stderr);
  fputc('\n', stderr);
}
#endif

#ifdef SIMT_THREAD
// ThreadSanitizer calls this after it has reported.
extern "C" int __tsan_get_report_mop(void* report, unsigned long index, int* thread, void** address, int* size,
                                     int* write, int* atomic, void** trace, unsigned long trace_size);
extern "C" void __tsan_on_report(void* report) {
  int thread, size, write, atomic;
  void* address = nullptr;
  void* trace[1];
  __tsan_get_report_mop(report, 0, &thread, &address, &size, &write, &atomic, trace, 1);
  fputs("simt-place: ", stderr);
  simt::describe_address(stderr, static_cast<const char*>(address));
  fputc('\n', stderr);
}
#endif

namespace {

struct Job {
  uint64_t seed = 0;
  int shared_fill = 0;
  std::vector<simt::Launch> launches;
};

simt::Extent read_extent(std::istream& from) {
  simt::Extent extent;
  from >> extent.x >> extent.y >> extent.z;
  return extent;
}

// An argument's value, in memory that stays.
void* read_argument(std::istream& from) {
  char kind;
  long long value;
  from >> kind >> value;
  auto* place = new uint64_t(0);
  if (kind == 'b') *place = reinterpret_cast<uint64_t>(simt::buffers.at(static_cast<size_t>(value)).memory);
  else memcpy(place, &value, kind == 'l' ? 8 : 4);
  return place;
}

void read_buffer(std::istream& from, const char* input) {
  simt::Buffer buffer;
  long offset;
  from >> buffer.name >> buffer.bytes >> offset;
  buffer.memory = static_cast<char*>(malloc(buffer.bytes));
  std::ifstream file(input, std::ios::binary);
  file.seekg(offset);
  file.read(buffer.memory, static_cast<long>(buffer.bytes));
  simt::buffers.push_back(buffer);
}

Job read_job(const char* path, const char* input) {
  Job job;
  std::ifstream from(path);
  for (std::string record; from >> record;) {
    if (record == "seed") {
      from >> job.seed >> job.shared_fill;
    } else if (record == "buffer") {
      read_buffer(from, input);
    } else {
      simt::Launch launch;
      size_t count;
      from >> launch.entry;
      launch.grid = read_extent(from);
      launch.block = read_extent(from);
      launch.cluster = read_extent(from);
      from >> launch.shared_bytes >> launch.cooperative >> launch.dependent >> count;
      while (count-- > 0) launch.arguments.push_back(read_argument(from));
      job.launches.push_back(launch);
    }
  }
  return job;
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  Job job = read_job(words[2], words[3]);
  simt::Objects objects(words[1]);
  simt::Machine machine(objects, job.seed, static_cast<unsigned char>(job.shared_fill));
  simt::machine = &machine;
  size_t acquired = 0;
  for (size_t i = 0; i < job.launches.size(); ++i) {
    // A launch that may begin early sees what its predecessors wrote only once it waits for them.
    if (!job.launches[i].dependent)
      for (; acquired < i; ++acquired) simt::acquire(&job.launches[acquired].done);
    machine.run(job.launches[i], i > 0 ? &job.launches[i - 1] : nullptr);
  }
  for (; acquired < job.launches.size(); ++acquired) simt::acquire(&job.launches[acquired].done);
  std::ofstream output(words[4], std::ios::binary);
  for (const simt::Buffer& buffer : simt::buffers) output.write(buffer.memory, static_cast<long>(buffer.bytes));
  output.flush();
  return output ? 0 : 3;
}
