// Copies of the shared object that holds the kernels: one for each block that is resident at a time, since a kernel's
// static shared memory is the object's static memory.
#pragma once
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "simt/fiber.hpp"
#include "simt/machine.hpp"

namespace simt {

struct Object {
  Unit unit;
  const Entry* entry(const std::string& name) const {
    for (int i = 0; i < unit.entry_count; ++i)
      if (name == unit.entries[i].name) return &unit.entries[i];
    return nullptr;
  }
};

class Objects {
 public:
  explicit Objects(std::string path) : path_(std::move(path)) {}

  // One that no resident block has. Where a copy must serve again, what `order` orders comes before.
  Object& take(void* order) {
#ifdef SIMT_THREAD
    // To ThreadSanitizer memory that was one block's and is now another's would be a race: blocks come without order.
    const bool fresh = free_.empty() || copies_.size() < kMostFresh;
#else
    const bool fresh = free_.empty();
#endif
    if (fresh) return open();
    Object* object = free_.front();
    free_.erase(free_.begin());
    acquire(order);
    return *object;
  }
  void give_back(Object& object) { free_.push_back(&object); }

 private:
  static constexpr size_t kMostFresh = 64;

  Object& open() {
    std::string path = path_;
    if (!copies_.empty()) {  // the loader knows a file that it has loaded, so each copy is a file
      path += "." + std::to_string(copies_.size());
      std::ofstream(path, std::ios::binary) << std::ifstream(path_, std::ios::binary).rdbuf();
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    auto unit = handle == nullptr ? nullptr : reinterpret_cast<Unit (*)()>(dlsym(handle, "simt_unit"));
    if (unit == nullptr) {
      fprintf(stderr, "simt: %s does not load: %s\n", path.c_str(), dlerror());
      exit(3);
    }
    copies_.push_back(std::make_unique<Object>(Object{unit()}));
    return *copies_.back();
  }

  std::string path_;
  std::vector<std::unique_ptr<Object>> copies_;
  std::vector<Object*> free_;
};

}  // namespace simt
