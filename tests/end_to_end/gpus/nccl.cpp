// Collectives between GPUs that there are not, under the names of NCCL: ranks are threads of one
// process, or of several, which exchange what members call and read by files in FAKE_MEETINGS. Sums are added in the order of ranks and rounded once. What a GPU does not have, and
// calls that members of a group make differently, are refused; what never comes is waited for until
// it has taken too long.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

// Whether bytes are memory of a GPU, from 1 on, and which one is in use: the driver's.
bool has_memory(int gpu, uintptr_t start, size_t bytes);
int gpu_in_use();

namespace {

enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum What { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };

struct Call {
  What what;
  const unsigned char* from;
  unsigned char* to;
  size_t count;
  int type, operation, peer;
};

// The meeting of a group: what each member calls in a round, and how many have come to its stages.
struct Group {
  // Where members of other processes are met; empty where there are none.
  std::string folder;
  std::mutex guard;
  std::condition_variable changed;
  std::vector<std::vector<Call>> calls;
  size_t arrived = 0, stage = 0;
  bool is_aborted = false;

  // Goes on when all members are here.
  bool meet() {
    std::unique_lock<std::mutex> lock(guard);
    size_t now = stage;
    if (++arrived == calls.size()) {
      arrived = 0, stage += 1;
      changed.notify_all();
    }
    auto is_over = [&] { return stage != now || is_aborted; };
    return changed.wait_for(lock, std::chrono::seconds(60), is_over) && !is_aborted;
  }
};

struct Communicator {
  std::shared_ptr<Group> group;
  int rank, gpu;
  size_t calls = 0, rounds = 0;
};

std::mutex guard;
std::map<std::string, std::shared_ptr<Group>> groups;
thread_local int depth;
thread_local std::vector<std::pair<Communicator*, Call>> queued;

int fails(const char* why) {
  fprintf(stderr, "nccl: %s\n", why);
  return INVALID_USAGE;
}

// Of i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, in their order.
const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

float wide(uint16_t bits, int type) {
  if (type == 6) {
    _Float16 x;
    return memcpy(&x, &bits, 2), (float)x;
  }
  uint32_t all = (uint32_t)bits << 16;
  float x;
  return memcpy(&x, &all, 4), x;
}
uint16_t narrow(float x, int type) {
  uint16_t bits;
  if (type == 6) {
    _Float16 half = (_Float16)x;
    return memcpy(&bits, &half, 2), bits;
  }
  uint32_t all;
  memcpy(&all, &x, 4);
  if ((all & 0x7fffffff) > 0x7f800000) return (uint16_t)(all >> 16 | 0x40);
  return (uint16_t)((all + 0x7fff + (all >> 16 & 1)) >> 16);
}

template <class T> T combined(T a, T b, int operation) {
  return operation == 0 ? (T)(a + b) : operation == 2 ? std::max(a, b) : std::min(a, b);
}
template <class T>
void reduce(const std::vector<const unsigned char*>& terms, size_t count, int operation, unsigned char* to) {
  for (size_t i = 0; i < count; i++) {
    T sum, term;
    memcpy(&sum, terms[0] + i * sizeof(T), sizeof(T));
    for (size_t m = 1; m < terms.size(); m++) {
      memcpy(&term, terms[m] + i * sizeof(T), sizeof(T));
      sum = combined(sum, term, operation);
    }
    memcpy(to + i * sizeof(T), &sum, sizeof(T));
  }
}
void reduce_narrow(const std::vector<const unsigned char*>& terms, size_t count, int operation, int type, unsigned char* to) {
  for (size_t i = 0; i < count; i++) {
    uint16_t bits;
    float sum = 0;
    for (size_t m = 0; m < terms.size(); m++) {
      memcpy(&bits, terms[m] + i * 2, 2);
      sum = m ? combined(sum, wide(bits, type), operation) : wide(bits, type);
    }
    bits = narrow(sum, type);
    memcpy(to + i * 2, &bits, 2);
  }
}
void reduce(const std::vector<const unsigned char*>& terms, const Call& call, unsigned char* to) {
  size_t count = call.count;
  int operation = call.operation;
  switch (call.type) {
    case 0: return reduce<int8_t>(terms, count, operation, to);
    case 1: return reduce<uint8_t>(terms, count, operation, to);
    case 2: return reduce<int32_t>(terms, count, operation, to);
    case 3: return reduce<uint32_t>(terms, count, operation, to);
    case 4: return reduce<int64_t>(terms, count, operation, to);
    case 7: return reduce<float>(terms, count, operation, to);
    case 8: return reduce<double>(terms, count, operation, to);
    default: return reduce_narrow(terms, count, operation, call.type, to);
  }
}

// What a member's call writes, from what all of them read.
bool result(const Group& group, int rank, size_t at, std::vector<unsigned char>& bytes) {
  const Call& own = group.calls[rank][at];
  size_t size = SIZES[own.type], members = group.calls.size();
  if (own.what == SEND) return true;
  if (own.what == RECEIVE) {
    // The messages of a pair are in order.
    size_t number = 0, seen = 0;
    for (size_t i = 0; i < at; i++) {
      const Call& other = group.calls[rank][i];
      number += other.what == RECEIVE && other.peer == own.peer;
    }
    for (const Call& other : group.calls[own.peer]) {
      if (other.what != SEND || other.peer != rank || seen++ != number) continue;
      bytes.assign(other.from, other.from + other.count * size);
      return other.count == own.count && other.type == own.type;
    }
    return false;
  }
  std::vector<const unsigned char*> terms;
  for (const auto& calls : group.calls) {
    if (calls.size() <= at) return false;
    const Call& other = calls[at];
    if (other.what != own.what || other.count != own.count || other.type != own.type) return false;
    if (other.operation != own.operation || other.peer != own.peer) return false;
    terms.push_back(other.from);
  }
  if (own.what == BROADCAST) {
    bytes.assign(terms[own.peer], terms[own.peer] + own.count * size);
  } else if (own.what == ALL_GATHER) {
    for (const unsigned char* term : terms) bytes.insert(bytes.end(), term, term + own.count * size);
  } else if (own.what != REDUCE || own.peer == rank) {
    for (size_t m = 0; own.what == REDUCE_SCATTER && m < members; m++) terms[m] += rank * own.count * size;
    bytes.resize(own.count * size);
    reduce(terms, own, bytes.data());
  }
  return true;
}

// Bytes that a call reads.
size_t read_bytes(const Call& call, size_t members, int rank) {
  bool reads = call.what != RECEIVE && (call.what != BROADCAST || call.peer == rank);
  return reads ? call.count * SIZES[call.type] * (call.what == REDUCE_SCATTER ? members : 1) : 0;
}

// As below, where each member has a file for each round: its calls, and what they read.
int run_apart(Communicator& own, const std::vector<Call>& calls) {
  size_t members = own.group->calls.size();
  auto name = [&](size_t member) {
    return own.group->folder + "-" + std::to_string(own.rounds) + "-" + std::to_string(member);
  };
  std::string draft = name(own.rank) + ".draft";
  {
    std::ofstream file(draft, std::ios::binary);
    for (const Call& call : calls) {
      file.write((const char*)&call, sizeof call);
      file.write((const char*)call.from, read_bytes(call, members, own.rank));
    }
  }
  if (rename(draft.c_str(), name(own.rank).c_str())) return SYSTEM_ERROR;
  Group all;
  std::vector<std::vector<char>> files(members);
  for (size_t member = 0; member < members; member++) {
    auto since = std::chrono::steady_clock::now();
    while (access(name(member).c_str(), R_OK)) {
      if (own.group->is_aborted || std::chrono::steady_clock::now() - since > std::chrono::seconds(60)) return SYSTEM_ERROR;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    std::ifstream file(name(member), std::ios::binary);
    files[member].assign(std::istreambuf_iterator<char>(file), {});
    std::vector<Call> of_member;
    for (size_t at = 0; at < files[member].size();) {
      Call call;
      memcpy(&call, &files[member][at], sizeof call);
      call.from = (const unsigned char*)files[member].data() + (at += sizeof call);
      at += read_bytes(call, members, member);
      of_member.push_back(call);
    }
    all.calls.push_back(of_member);
  }
  // All have read what is two rounds back.
  if (own.rounds > 1) unlink((own.group->folder + "-" + std::to_string(own.rounds - 2) + "-" + std::to_string(own.rank)).c_str());
  own.rounds += 1;
  for (size_t at = 0; at < calls.size(); at++) {
    std::vector<unsigned char> bytes;
    if (!result(all, own.rank, at, bytes)) return fails("members of a group call differently");
    memcpy(calls[at].to, bytes.data(), bytes.size());
  }
  return SUCCESS;
}

int run(Communicator& own, std::vector<Call> calls) {
  Group& group = *own.group;
  if (!group.folder.empty()) return run_apart(own, calls);
  {
    std::lock_guard<std::mutex> lock(group.guard);
    group.calls[own.rank] = calls;
  }
  if (!group.meet()) return SYSTEM_ERROR;
  std::vector<std::vector<unsigned char>> results(calls.size());
  bool agree = true;
  for (size_t at = 0; at < calls.size(); at++) agree = result(group, own.rank, at, results[at]) && agree;
  // Nobody writes what others still read.
  if (!group.meet()) return SYSTEM_ERROR;
  if (!agree) return fails("members of a group call differently");
  for (size_t at = 0; at < calls.size(); at++) memcpy(calls[at].to, results[at].data(), results[at].size());
  return SUCCESS;
}

int add(void* communicator, Call call) {
  Communicator& own = *(Communicator*)communicator;
  size_t members = own.group->calls.size(), bytes = call.count * SIZES[call.type];
  size_t read = read_bytes(call, members, own.rank);
  size_t written = call.what == ALL_GATHER ? members * bytes : bytes;
  bool writes = call.what != SEND && (call.what != REDUCE || call.peer == own.rank);
  own.calls += 1;
  if (gpu_in_use() != own.gpu) return fails("another GPU is in use");
  if (read && !has_memory(own.gpu, (uintptr_t)call.from, read)) return fails("what the GPU does not have is read");
  if (writes && !has_memory(own.gpu, (uintptr_t)call.to, written)) return fails("what the GPU does not have is written");
  queued.push_back({&own, call});
  if (depth) return SUCCESS;
  queued.clear();
  return run(own, {call});
}

}  // namespace

extern "C" {

struct Id { char bytes[128]; };

int ncclGetUniqueId(Id* id) {
  static int next = 0;
  std::lock_guard<std::mutex> lock(guard);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "group-%d-%d", (int)getpid(), next++);
  return SUCCESS;
}
int ncclCommInitRank(void** communicator, int members, Id id, int rank) {
  std::lock_guard<std::mutex> lock(guard);
  std::shared_ptr<Group>& group = groups[id.bytes];
  const char* meetings = getenv("FAKE_MEETINGS");
  if (!group) {
    group = std::make_shared<Group>(), group->calls.resize(members);
    if (meetings) group->folder = std::string(meetings) + "/" + id.bytes;
  }
  if (group->calls.size() != (size_t)members || rank >= members) return INVALID_ARGUMENT;
  return *communicator = new Communicator{group, rank, gpu_in_use(), 0}, SUCCESS;
}
int ncclCommDestroy(void* communicator) {
  if (getenv("FAKE_TELLS")) fprintf(stderr, "nccl: %zu calls\n", ((Communicator*)communicator)->calls);
  return delete (Communicator*)communicator, SUCCESS;
}
int ncclCommAbort(void* communicator) {
  Group& group = *((Communicator*)communicator)->group;
  std::lock_guard<std::mutex> lock(group.guard);
  group.is_aborted = true;
  return group.changed.notify_all(), SUCCESS;
}

int ncclGroupStart() { return depth++, SUCCESS; }
int ncclGroupEnd() {
  if (--depth) return SUCCESS;
  auto all = std::move(queued);
  queued.clear();
  int status = SUCCESS;
  while (!all.empty()) {
    Communicator* first = all[0].first;
    std::vector<Call> calls;
    for (const auto& [own, call] : all) {
      if (own == first) calls.push_back(call);
    }
    all.erase(std::remove_if(all.begin(), all.end(), [&](auto& of) { return of.first == first; }), all.end());
    status = std::max(status, run(*first, calls));
  }
  return status;
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, void* communicator, void*) {
  return add(communicator, {ALL_REDUCE, (const unsigned char*)from, (unsigned char*)to, count, type, operation, 0});
}
int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int root, void* communicator, void*) {
  return add(communicator, {REDUCE, (const unsigned char*)from, (unsigned char*)to, count, type, operation, root});
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* communicator, void*) {
  return add(communicator, {BROADCAST, (const unsigned char*)from, (unsigned char*)to, count, type, 0, root});
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* communicator, void*) {
  return add(communicator, {ALL_GATHER, (const unsigned char*)from, (unsigned char*)to, count, type, 0, 0});
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, void* communicator, void*) {
  return add(communicator, {REDUCE_SCATTER, (const unsigned char*)from, (unsigned char*)to, count, type, operation, 0});
}
int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, void*) {
  return add(communicator, {SEND, (const unsigned char*)from, nullptr, count, type, 0, peer});
}
int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, void*) {
  return add(communicator, {RECEIVE, nullptr, (unsigned char*)to, count, type, 0, peer});
}

}
