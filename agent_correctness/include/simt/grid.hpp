// Blocks, warps and clusters of fibers: who waits for whom, and in which order they run.
//
// The one idea: each pass over the threads runs every one that can run, in an order that the seed chose, up to its next
// wait. Blocks begin one after another (a cluster's, and a cooperative grid's, together); when all that have begun wait
// for memory, the next one begins, as on a GPU with room. When there is no next one, no thread can go on: a deadlock.
// Now and then a block is held back until no other can go on without it, so that what is right only while blocks keep step
// shows.
#pragma once
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "simt/fiber.hpp"
#include "simt/machine.hpp"
#include "simt/objects.hpp"

namespace simt {

enum class State { kReady, kAtBlockBarrier, kAtWarpOperation, kAtClusterBarrier, kPolling, kEnded };

// One operation of the lanes of a mask, from the first that comes to the last that leaves.
struct WarpMeeting {
  WarpOperation operation;
  unsigned mask = 0, come = 0;
  bool open = false;
  uint64_t value[32];
};

struct Block;

struct Thread {
  Here here;
  Block* block;
  unsigned number;
  State state = State::kReady;
  WarpMeeting* meeting = nullptr;
  unsigned cluster_phase = 0;
  std::unique_ptr<Copy[]> copies;
  std::unique_ptr<Fiber> fiber;
};

struct Warp {
  static constexpr int kMeetings = 256;
  WarpMeeting meetings[kMeetings];
  int next = 0;
};

// Counts those who come; all go on when those who are left have come. Two places for what a phase orders, since a
// thread may come to the next phase before another has left this one.
struct Barrier {
  unsigned come = 0, chosen = 0, phase = 0;
  unsigned result[2];
  char order[2];
};

struct Cluster {
  Barrier barrier;
  std::vector<Block*> blocks;
};

struct Block {
  Extent index;
  unsigned rank = 0;
  std::shared_ptr<Cluster> cluster;
  Object* object = nullptr;
  char* dynamic_shared = nullptr;
  ~Block() { free(dynamic_shared); }
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<unsigned> order;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned live = 0;
  char begun = 0;  // what was done before it began happened before what its threads do
};

struct Launch {
  std::string entry;
  Extent grid, block, cluster;
  size_t shared_bytes;
  bool cooperative, dependent;
  std::vector<void*> arguments;  // each points to an argument's value
  char done = 0;                 // what its threads did happened before who acquires this
};

// A sequence of numbers that a seed determines (Marsaglia's xorshift).
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  unsigned below(unsigned bound) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<unsigned>((state_ >> 11) % bound);
  }
  // 0 to count - 1; in order for seed 0.
  std::vector<unsigned> permutation(unsigned count, bool shuffled) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; ++i) order[i] = i;
    for (unsigned i = count; shuffled && i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    return order;
  }

 private:
  uint64_t state_;
};

class Machine {
 public:
  Machine(Objects& objects, uint64_t seed, unsigned char shared_fill)
      : objects_(objects), draw_(seed), shuffled_(seed != 0), shared_fill_(shared_fill) {}

  // `previous`: the launch before it in the stream, or null.
  void run(Launch& launch, Launch* previous) {
    launch_ = &launch;
    previous_ = previous;
    const Extent clusters = {launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                             launch.grid.z / launch.cluster.z};
    waiting_ = draw_.permutation(clusters.count(), shuffled_);
    next_ = 0;
    held_ = nullptr;
    do begin_cluster(clusters);
    while (launch.cooperative && next_ < waiting_.size());
    for (int idle = 0; !blocks_.empty();) {
      moved_ = ran_ = false;
      pass();
      retire();
      const bool was_held = held_ != nullptr;
      hold();
      if (was_held && !moved_) continue;
      idle = moved_ ? 0 : idle + 1;
      if (next_ < waiting_.size() && (blocks_.empty() || !ran_ || idle > kIdlePasses)) {
        begin_cluster(clusters);
        idle = 0;
      } else if (!blocks_.empty() && (!ran_ || idle > kIdlePasses)) {
        deadlock();
      }
    }
    launch_ = nullptr;
  }

  // ---- what a thread asks for; it is the one that runs

  unsigned block_barrier(bool predicate) {
    Block& block = *me_->block;
    Barrier& barrier = block.barrier;
    const unsigned phase = barrier.phase;
    release(&barrier.order[phase % 2]);
    ++barrier.come;
    barrier.chosen += predicate;
    if (!settle(block)) leave(State::kAtBlockBarrier);
    acquire(&barrier.order[phase % 2]);
    return barrier.result[phase % 2];
  }

  uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int source) {
    const unsigned lane = me_->number % 32;
    if ((mask >> lane & 1) == 0) fail("mask", "a thread takes part in a warp operation whose mask leaves it out");
    WarpMeeting& meeting = join(me_->block->warps[me_->number / 32], operation, mask);
    meeting.come |= 1u << lane;
    meeting.value[lane] = value;
    if (operation == WarpOperation::kBarrier) release(&meeting);
    me_->meeting = &meeting;
    if (!settle(meeting)) leave(State::kAtWarpOperation);
    if (operation == WarpOperation::kBarrier) acquire(&meeting);
    if (operation == WarpOperation::kBallot) {
      uint64_t lanes = 0;
      for (int i = 0; i < 32; ++i) lanes |= uint64_t((meeting.come >> i & 1) != 0 && meeting.value[i] != 0) << i;
      return lanes;
    }
    if (operation == WarpOperation::kShuffle && (meeting.come >> source & 1) == 0)
      fail("mask", "a shuffle takes the value of a lane that takes no part in it");
    return meeting.value[source];
  }

  void cluster_arrive() {
    Cluster& cluster = *me_->block->cluster;
    release(&cluster.barrier.order[cluster.barrier.phase % 2]);
    me_->cluster_phase = cluster.barrier.phase + 1;
    ++cluster.barrier.come;
    settle(cluster);
  }
  void cluster_wait() {
    Cluster& cluster = *me_->block->cluster;
    if (me_->cluster_phase == 0) fail("barrier", "a thread waits at a cluster's barrier before it arrived there");
    if (cluster.barrier.phase < me_->cluster_phase) leave(State::kAtClusterBarrier);
    acquire(&cluster.barrier.order[(me_->cluster_phase - 1) % 2]);
  }

  void* in_block_of_cluster(void* place, unsigned rank) {
    Block& own = *me_->block;
    if (rank >= own.cluster->blocks.size()) fail("out_of_bounds", "a block of the cluster that does not exist");
    Block& other = *own.cluster->blocks[rank];
    char* address = static_cast<char*>(place);
    if (own.dynamic_shared != nullptr && address >= own.dynamic_shared &&
        address < own.dynamic_shared + launch_->shared_bytes)
      return other.dynamic_shared + (address - own.dynamic_shared);
    if (address < own.object->unit.shared_begin || address >= own.object->unit.shared_end)
      fail("out_of_bounds", "an address that is not in shared memory is taken to another block");
    if (other.live == 0) fail("out_of_bounds", "shared memory of a block of the cluster that has ended");
    return other.object->unit.shared_begin + (address - own.object->unit.shared_begin);
  }
  void* dynamic_shared() {
    if (me_->block->dynamic_shared == nullptr) fail("out_of_bounds", "the launch has no dynamic shared memory");
    return me_->block->dynamic_shared;
  }
  Copy* room_for_copies() {
    me_->copies = std::make_unique<Copy[]>(kMostCopies);
    return me_->copies.get();
  }
  void pause(bool wrote) {
    moved_ |= wrote;
    leave(wrote ? State::kReady : State::kPolling);
  }
  void wait_for_previous() {
    if (previous_ != nullptr) acquire(&previous_->done);
  }

  // ---- for messages

  void describe_thread(FILE* to) const {
    if (me_ == nullptr) return;
    const Extent& t = me_->here.thread;
    const Extent& b = me_->here.block;
    fprintf(to, "thread (%u, %u, %u) of block (%u, %u, %u) of %s", t.x, t.y, t.z, b.x, b.y, b.z,
            launch_->entry.c_str());
  }
  // Writes which block's dynamic shared memory begins nearest below an address; whether there is one within a page.
  bool describe_shared(FILE* to, const char* address) const {
    for (const auto& block : blocks_) {
      const char* begin = block->dynamic_shared;
      if (begin == nullptr || address + 4096 < begin || address > begin + launch_->shared_bytes + 4096) continue;
      fprintf(to, "byte %td of %zu of dynamic shared memory", address - begin, launch_->shared_bytes);
      return true;
    }
    return false;
  }

 private:
  static constexpr int kIdlePasses = 32;  // in which nothing moved but threads that look at memory
  static constexpr unsigned kHoldOneIn = 16, kMostHeld = 4096;  // passes: how often a block is held back, and how long
  static constexpr unsigned kMostThreads = 6000;  // at once; ThreadSanitizer knows 8192

  // -- blocks

  void begin_cluster(const Extent& clusters) {
    const unsigned number = waiting_[next_++];
    const Extent at = {number % clusters.x, number / clusters.x % clusters.y, number / clusters.x / clusters.y};
    auto cluster = std::make_shared<Cluster>();
    const Extent size = launch_->cluster;
    for (unsigned rank : draw_.permutation(size.count(), false)) {
      const Extent inside = {rank % size.x, rank / size.x % size.y, rank / size.x / size.y};
      const Extent index = {at.x * size.x + inside.x, at.y * size.y + inside.y, at.z * size.z + inside.z};
      begin_block(index, rank, inside, cluster);
    }
  }

  void begin_block(Extent index, unsigned rank, Extent inside, const std::shared_ptr<Cluster>& cluster) {
    if ((blocks_.size() + 1) * launch_->block.count() > kMostThreads)
      fail("unsupported", "more threads at once than the machine has room for");
    auto block = std::make_unique<Block>();
    block->index = index;
    block->rank = rank;
    block->cluster = cluster;
    block->object = &objects_.take(&launch_->done);
    fill(block->object->unit.shared_begin, block->object->unit.shared_end);
    if (launch_->shared_bytes > 0) {
      block->dynamic_shared = static_cast<char*>(malloc(launch_->shared_bytes));
      fill(block->dynamic_shared, block->dynamic_shared + launch_->shared_bytes);
    }
    const unsigned count = launch_->block.count();
    block->live = count;
    block->order = draw_.permutation(count, shuffled_);
    block->warps.resize((count + 31) / 32);
    const Extent size = launch_->block;
    for (unsigned number = 0; number < count; ++number) {
      auto thread = std::make_unique<Thread>();
      thread->here.thread = {number % size.x, number / size.x % size.y, number / size.x / size.y};
      thread->here.block = index;
      thread->here.block_extent = size;
      thread->here.grid_extent = launch_->grid;
      thread->here.block_in_cluster = inside;
      thread->here.cluster_extent = launch_->cluster;
      thread->block = block.get();
      thread->number = number;
      thread->fiber = std::make_unique<Fiber>(&Machine::body);
      block->threads.push_back(std::move(thread));
    }
    release(&block->begun);
    cluster->blocks.push_back(block.get());
    blocks_.push_back(std::move(block));
  }

  // Large numbers, different from place to place. The gaps between variables are written too.
  void fill(char* begin, char* end) const {
    for (char* at = begin; at != end; ++at) {
      const auto offset = static_cast<unsigned>(at - begin);
      *at = static_cast<char>(offset % 4 == 3 ? shared_fill_ : 7 * offset + 13 * (offset >> 8) + shared_fill_);
    }
  }

  void retire() {
    for (size_t i = 0; i < blocks_.size();) {
      bool over = true;  // a cluster's shared memory stays until all its blocks have ended
      for (const Block* block : blocks_[i]->cluster->blocks) over &= block->live == 0;
      if (!over) {
        ++i;
        continue;
      }
      const std::shared_ptr<Cluster> cluster = blocks_[i]->cluster;
      for (size_t j = 0; j < blocks_.size();) {
        if (blocks_[j]->cluster != cluster) {
          ++j;
          continue;
        }
        objects_.give_back(*blocks_[j]->object);
        for (const auto& thread : blocks_[j]->threads) thread->fiber.reset();
#ifdef SIMT_THREAD
        // Nothing orders its threads before this one yet, so that to free what they used would be a race.
        ended_.push_back(std::move(blocks_[j]));
#endif
        blocks_.erase(blocks_.begin() + static_cast<long>(j));
      }
      i = 0;
    }
  }

  // -- threads

  void pass() {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b].get() == held_) continue;
      for (unsigned number : blocks_[b]->order) {
        Thread& thread = *blocks_[b]->threads[number];
        if (thread.state != State::kReady && thread.state != State::kPolling) continue;
        ran_ = true;
        me_ = &thread;
        here = &thread.here;
        host_.switch_to(*thread.fiber);
        moved_ |= thread.state != State::kPolling;
        me_ = nullptr;
      }
    }
  }

  // Chooses whom the next pass holds back: the same block for as long as others move, and at most so many passes.
  void hold() {
    if (held_ != nullptr) {
      if (!moved_ || --held_passes_ == 0) held_ = nullptr;
    } else if (shuffled_ && blocks_.size() > 1 && draw_.below(kHoldOneIn) == 0) {
      held_ = blocks_[draw_.below(static_cast<unsigned>(blocks_.size()))].get();
      held_passes_ = kMostHeld;
    }
  }

  // Ends the thread's turn; returns when it is to go on.
  void leave(State state) {
    me_->state = state;
    me_->fiber->switch_to(host_);
    me_->state = State::kReady;
  }

  static void body();
  void run_thread() {
    Thread& me = *me_;
    acquire(&me.block->begun);
    me.block->object->entry(launch_->entry)->call(launch_->arguments.data());
    release(&launch_->done);
    me.state = State::kEnded;
    --me.block->live;
    settle(*me.block);
    settle(*me.block->cluster);
    for (WarpMeeting& meeting : me.block->warps[me.number / 32].meetings)
      if (meeting.open) settle(meeting, me.block, me.number / 32);
    me.fiber->switch_to(host_, true);
  }

  // Each lets those who wait go on once all have come that are to come; whether it did.
  bool settle(Block& block) {
    Barrier& barrier = block.barrier;
    if (barrier.come == 0 || barrier.come < block.live) return false;
    barrier.result[barrier.phase % 2] = barrier.chosen;
    ++barrier.phase;
    barrier.come = barrier.chosen = 0;
    wake(block, State::kAtBlockBarrier);
    return true;
  }
  void settle(Cluster& cluster) {
    unsigned live = 0;
    for (const Block* block : cluster.blocks) live += block->live;
    if (cluster.barrier.come == 0 || cluster.barrier.come < live) return;
    ++cluster.barrier.phase;
    cluster.barrier.come = 0;
    for (Block* block : cluster.blocks) wake(*block, State::kAtClusterBarrier);
  }
  bool settle(WarpMeeting& meeting) { return settle(meeting, me_->block, me_->number / 32); }
  bool settle(WarpMeeting& meeting, Block* block, unsigned warp) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      const unsigned number = warp * 32 + lane;
      const bool there = number < block->threads.size() && block->threads[number]->state != State::kEnded;
      if (there && (meeting.mask >> lane & 1) != 0 && (meeting.come >> lane & 1) == 0) return false;
    }
    meeting.open = false;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if ((meeting.come >> lane & 1) == 0) continue;
      Thread& thread = *block->threads[warp * 32 + lane];
      if (thread.meeting == &meeting && thread.state == State::kAtWarpOperation) thread.state = State::kReady;
    }
    return true;
  }
  static void wake(Block& block, State waiting) {
    for (const auto& thread : block.threads)
      if (thread->state == waiting) thread->state = State::kReady;
  }

  WarpMeeting& join(Warp& warp, WarpOperation operation, unsigned mask) {
    const unsigned lane = me_->number % 32;
    for (WarpMeeting& meeting : warp.meetings) {
      if (!meeting.open || meeting.mask != mask || (meeting.come >> lane & 1) != 0) continue;
      if (meeting.operation != operation) fail("mask", "lanes of one mask are at different warp operations");
      return meeting;
    }
    WarpMeeting& meeting = warp.meetings[warp.next++ % Warp::kMeetings];
    if (meeting.open) fail("unsupported", "more warp operations under way than the machine has room for");
    meeting.operation = operation;
    meeting.mask = mask;
    meeting.come = 0;
    meeting.open = true;
    return meeting;
  }

  [[noreturn]] void deadlock() {
    static const char* const names[] = {"ready", "the block's barrier", "a warp operation", "the cluster's barrier",
                                        "memory that another block writes", "ended"};
    for (const auto& block : blocks_) {
      for (const auto& thread : block->threads) {
        if (thread->state == State::kEnded) continue;
        me_ = thread.get();
        unsigned ended = 0;
        for (const auto& other : block->threads) ended += other->state == State::kEnded;
        char text[160];
        snprintf(text, sizeof text, "nobody can go on: this thread waits for %s; %u of its block's %zu have ended",
                 names[static_cast<int>(thread->state)], ended, block->threads.size());
        fail("deadlock", text);
      }
    }
    fail("deadlock", "nobody can go on");
  }

  Objects& objects_;
  Draw draw_;
  bool shuffled_;
  unsigned char shared_fill_;
  Fiber host_;
  Launch* launch_ = nullptr;
  Launch* previous_ = nullptr;
  std::vector<unsigned> waiting_;  // clusters in the order in which they begin
  size_t next_ = 0;
  std::vector<std::unique_ptr<Block>> blocks_, ended_;
  Thread* me_ = nullptr;
  const Block* held_ = nullptr;
  unsigned held_passes_ = 0;
  bool moved_ = false, ran_ = false;
};

}  // namespace simt
