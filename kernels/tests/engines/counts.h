// Counts of what a launch accesses: sectors of global memory, and turns of the banks of shared
// memory. The compiler's hooks see each load and store of each thread; what a warp's lanes access
// by one instruction, each for the same time since they met last, is one request. Of TMA each row of
// a box is one.

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#pragma GCC visibility push(hidden)

namespace shim {

// Of global memory, sectors of 32 bytes that requests touch, and as many as their bytes fill. Of
// shared memory, turns that requests take, and as many as their words fill at 32 a turn; those of
// ldmatrix too.
struct Counts { u_int64_t sectors, sectors_ideal, turns, turns_ideal, matrix_turns, matrix_turns_ideal; };

struct Region { const unsigned char* start; size_t bytes; };
// What a lane accesses: of a buffer, as if that started at a sector.
struct Lane { unsigned int thread; u_int64_t place; size_t bytes; };
struct Request { std::vector<Lane> lanes; bool is_global, is_matrix; };
typedef std::tuple<unsigned int, const void*, u_int64_t> RequestKey;

thread_local Counts counts;
thread_local std::vector<Region> regions;
// Those of the block: by warp, instruction, and how often a lane has come by it.
thread_local std::map<RequestKey, Request> requests;
thread_local std::map<std::pair<unsigned int, const void*>, u_int64_t> passed;
thread_local u_int64_t counted_serial = 0;

inline void count_request(Request& of) {
  std::sort(of.lanes.begin(), of.lanes.end(), [](const Lane& a, const Lane& b) { return a.thread < b.thread; });
  if (of.is_global) {
    std::set<u_int64_t> sectors, bytes;
    for (const Lane& lane : of.lanes) {
      for (size_t i = 0; i < lane.bytes; i++) {
        bytes.insert(lane.place + i);
        sectors.insert((lane.place + i) / 32);
      }
    }
    counts.sectors += sectors.size();
    counts.sectors_ideal += (bytes.size() + 31) / 32;
    return;
  }
  // A turn serves 128 bytes: of 16 bytes each, eight lanes.
  size_t at_once = 128 / std::max<size_t>(of.lanes[0].bytes, 4);
  for (size_t first = 0; first < of.lanes.size(); first += at_once) {
    std::set<u_int64_t> words, banks[32];
    for (size_t at = first; at < std::min(first + at_once, of.lanes.size()); at++) {
      const Lane& lane = of.lanes[at];
      for (size_t i = 0; i < lane.bytes; i++) {
        u_int64_t word = (lane.place + i) / 4;
        words.insert(word);
        banks[word % 32].insert(word);
      }
    }
    size_t most = 0;
    for (const std::set<u_int64_t>& bank : banks) most = std::max(most, bank.size());
    (of.is_matrix ? counts.matrix_turns : counts.turns) += most;
    (of.is_matrix ? counts.matrix_turns_ideal : counts.turns_ideal) += (words.size() + 31) / 32;
  }
}

inline void end_requests() {
  for (auto& [_, request] : requests) count_request(request);
  requests.clear();
  passed.clear();
}

// How often a thread has come by an instruction since it last met others, behind the number of that
// meeting. What lanes do before they meet and behind it is never one request.
UNCHECKED inline u_int64_t pass(const void* instruction) {
  u_int64_t meetings = running ? running->current->meetings << 32 : 0;
  u_int64_t& time = passed[{thread_index.x, instruction}];
  time = std::max(time, meetings);
  return time++;
}

// The buffer that a byte is of.
inline const Region* buffer_of(const unsigned char* place) {
  for (const Region& of : regions) {
    if (place >= of.start && place < of.start + of.bytes) return &of;
  }
  return nullptr;
}

// Counts an access to a buffer or to shared memory; those to stacks and of the shim itself are not.
UNCHECKED inline void count_access(const void* at, size_t bytes, const void* instruction, bool is_matrix) {
  if (is_internal) return;
  is_internal = true;
  const unsigned char* place = (const unsigned char*)at;
  const Region* buffer = buffer_of(place);
  bool is_shared = block.dynamic && place >= block.dynamic && place < block.dynamic + block.dynamic_bytes;
  for (size_t i = 0; i < block.array_count; i++) {
    const unsigned char* start = block.arrays[i].start + block.arrays[i].before;
    is_shared = is_shared || (place >= start && place < start + block.arrays[i].bytes);
  }
  if (buffer || is_shared) {
    if (counted_serial != serial) end_requests();
    counted_serial = serial;
    unsigned int thread = thread_index.x;
    Request& of = requests[RequestKey{thread / 32, instruction, pass(instruction)}];
    of.is_global = buffer != nullptr;
    of.is_matrix = is_matrix;
    // Buffers are less than 2^40 bytes.
    u_int64_t from = buffer ? (u_int64_t)(place - buffer->start) + ((u_int64_t)(buffer - regions.data()) << 40) : (u_int64_t)place;
    of.lanes.push_back(Lane{thread, from, bytes});
  }
  is_internal = false;
}

UNCHECKED inline void pass_access(const void* instruction) {
  if (is_internal) return;
  is_internal = true;
  if (counted_serial != serial) end_requests();
  counted_serial = serial;
  pass(instruction);
  is_internal = false;
}

UNCHECKED inline void count_bytes(const void* at, size_t bytes) {
  const unsigned char* place = (const unsigned char*)at;
  const Region* buffer = buffer_of(place);
  if (!buffer) return;
  size_t from = (size_t)(place - buffer->start);
  counts.sectors += (from + bytes + 31) / 32 - from / 32;
  counts.sectors_ideal += (bytes + 31) / 32;
}

UNCHECKED inline void count_box(const TensorMap& map, const int* first) {
  Uncounted here;
  const unsigned char* base = (const unsigned char*)map.base;
  size_t start = 0, bytes = 0, row = map.box[0] * map.element;
  auto end_row = [&] {
    if (bytes) count_bytes(base + start, bytes);
    bytes = 0;
  };
  each_of_box(map, first, [&](size_t byte, bool is_there, size_t offset) {
    if (byte % row == 0) end_row();
    if (!is_there) return;
    if (!bytes) start = offset;
    bytes += map.element;
  });
  end_row();
}

}  // namespace shim

#pragma GCC visibility pop

// A buffer of the next launches.
extern "C" void shim_region(const void* start, size_t bytes) {
  // Its hooks must not look at what is being moved.
  shim::is_internal = true;
  shim::regions.push_back(shim::Region{(const unsigned char*)start, bytes});
  shim::is_internal = false;
}

// The counts since the last call, which ends what is counted.
extern "C" void shim_counts(u_int64_t* to) {
  shim::is_internal = true;
  shim::end_requests();
  memcpy(to, &shim::counts, sizeof shim::counts);
  shim::counts = shim::Counts{};
  shim::regions.clear();
  shim::is_internal = false;
}
