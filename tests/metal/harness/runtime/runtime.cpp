// Runs a compiled kernel: one threadgroup after the other, with one fiber per thread.
//
// The kernel is compiled with -fsanitize=thread, but not linked to ThreadSanitizer: the __tsan_* functions, which
// the compiler calls before each load and store, are defined here.
#include <dlfcn.h>
#include <link.h>

#include "collectives.h"
#include "signals.h"

// Accesses that the compiler can't assume to be aligned call __tsan_unaligned_*.
static void aligned_access(const void* pointer, size_t n, int mode, const void* pc) {
  if ((uintptr_t)pointer % n)
    fault(pc, -1, "misaligned %s of %zu bytes", name_of_mode(mode), n);
  access(pointer, n, mode, pc);
}

#define ACCESS(n)                                                                   \
  EXPORT void __tsan_read##n(void* p) { aligned_access(p, n, kRead, PC); }       \
  EXPORT void __tsan_write##n(void* p) { aligned_access(p, n, kWrite, PC); }       \
  EXPORT void __tsan_unaligned_read##n(void* p) { access(p, n, kRead, PC); }     \
  EXPORT void __tsan_unaligned_write##n(void* p) { access(p, n, kWrite, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
EXPORT void __tsan_init() {}
EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(from, n, kRead, PC);
  access(to, n, kWrite, PC);
  return memcpy(to, from, n);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(from, n, kRead, PC);
  access(to, n, kWrite, PC);
  return memmove(to, from, n);
}
EXPORT void* __tsan_memset(void* to, int value, size_t n) {
  access(to, n, kWrite, PC);
  return memset(to, value, n);
}

// Checks an atomic operation that reads, writes or both, and returns the old value.
EXPORT uint32_t hx_atomic(uint64_t address, int mode) {
  aligned_access((const void*)address, sizeof(uint32_t), mode | kAtomic, PC);
  return *(const uint32_t*)address;
}
EXPORT void hx_atomic_set(uint64_t address, uint32_t value) { *(uint32_t*)address = value; }

// Called by the checks of -fsanitize=array-bounds,integer-divide-by-zero.
struct TypeDescriptor {
  uint16_t kind, info;  // of an integer: 2 log2(bits) + is_signed
  char name[1];
};
struct CheckData {
  const char* file;
  uint32_t line, column;
  const TypeDescriptor *type, *index_type;
};

EXPORT void __ubsan_handle_out_of_bounds_abort(const CheckData* data, uint64_t index) {
  const int unused = 64 - (1 << (data->index_type->info >> 1));
  const long value = data->index_type->info & 1 ? int64_t(index << unused) >> unused : int64_t(index);
  const char *type = data->type->name + 1, *space = strstr(type, "__private ");
  if (!space) space = strstr(type, "__generic ");
  fault(PC, -1, "index %ld is out of bounds of a local array or vector of type '%s", value,
        space ? space + strlen("__private ") : type);
}
EXPORT void __ubsan_handle_divrem_overflow_abort(const CheckData*, uint64_t, uint64_t) {
  fault(PC, -1, "integer division by zero");
}

static void find_code(const void* entry) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* entry) {
        uintptr_t low = info->dlpi_addr, high = low;
        for (int i = 0; i < info->dlpi_phnum; i++)
          if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            uintptr_t end = low + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
            if (end > high) high = end;
          }
        if ((uintptr_t)entry < low || (uintptr_t)entry >= high) return 0;
        L.code_low = low, L.code_high = high;
        return 1;
      },
      (void*)entry);
}

// Each buffer gets a slot of at least four times the size of the largest buffer, and starts at a quarter of it, so that
// an out-of-bounds access doesn't reach another buffer. Inputs are aligned to their elements only, as slices are.
static bool allocate_buffers(const Buffer* given, int count) {
  uint64_t largest = 1 << 18;
  for (int i = 0; i < count; i++) largest = given[i].bytes > largest ? given[i].bytes : largest;
  L.slot_shift = 64 - __builtin_clzl(largest * 4 - 1);
  L.space_bytes = size_t(count) << L.slot_shift;
  void* p = mmap(nullptr, L.space_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
  L.space = (uintptr_t)p;
  L.buffer_count = count;
  for (int i = 0; i < count; i++) {
    const Buffer& b = given[i];
    uint8_t* base = (uint8_t*)p + (size_t(i) << L.slot_shift) + (size_t(1) << (L.slot_shift - 2));
    if (b.kind == kInput || b.kind == kConstant) base += random_below(4) * b.granule;
    L.buffers[i] = {b.name, base, b.bytes, b.start, b.granule, b.kind, nullptr, nullptr, nullptr};
    const size_t cells = b.bytes / b.granule + 1;
    if (b.kind == kOutput) memset(base, 0xff, b.bytes);
    else memcpy(base, b.data, b.bytes);
    if (b.kind == kOutput) L.buffers[i].cells = (Cell*)calloc(cells, sizeof(Cell));
    if (b.kind == kInput) L.buffers[i].read_marks = (uint32_t*)calloc(cells, sizeof(uint32_t));
  }
  return true;
}

static void finish(const Buffer* given) {
  L.current = nullptr;
  for (int i = 0; i < L.buffer_count; i++) {
    Region& r = L.buffers[i];
    if (r.kind == kOutput && !L.faulted) {
      memcpy(given[i].data, r.base, r.bytes);
      for (uint64_t c = 0; c < r.bytes / r.granule; c++)
        if (!r.cells[c].write.group && !(r.atomic_cells && r.atomic_cells[c].write.group)) {
          snprintf(L.report->message, sizeof L.report->message, "%s[%lu] is never written", r.name, (unsigned long)c);
          L.faulted = true;
          break;
        }
    }
    free(r.cells), free(r.atomic_cells), free(r.read_marks);
  }
  for (Region& array : L.threadgroup_arrays) free(array.cells), free(array.atomic_cells), array = Region{};
  munmap((void*)L.space, L.space_bytes);
  L.space_bytes = 0;
}

static uint32_t gcd(uint32_t a, uint32_t b) { return b ? gcd(b, a % b) : a; }

EXPORT int hx_launch(void (*entry)(), const Buffer* buffers, int count, const uint32_t* grid, const uint32_t* group,
                     uint64_t seed, double seconds, Report* report) {
  L.report = report;
  L.entry = entry;
  L.faulted = false;
  L.group = 0;
  report->pc = report->other_pc = -1;
  find_code((void*)entry);
  random_state = (seed + 1) * 0x9e3779b97f4a7c15ull;
  if (all_stacks() == MAP_FAILED || arena() == MAP_FAILED || !allocate_buffers(buffers, count)) {
    snprintf(report->message, sizeof report->message, "can't allocate address space for stacks and buffers");
    return 1;
  }
  uint32_t total = 1;
  for (int i = 0; i < 3; i++) {
    L.grid[i] = grid[i], L.dispatched[i] = group[i];
    L.groups[i] = (grid[i] + group[i] - 1) / group[i];
    total *= L.groups[i];
  }
  // A step coprime to the number of groups visits each once.
  uint32_t step = 1 + random_below(total);
  while (gcd(step, total) != 1) step++;
  uint32_t number = random_below(total);
  install_handlers(seconds);
  for (uint32_t i = 0; i < total && !L.faulted; i++) {
    number = uint32_t((uint64_t(number) + step) % total);
    L.group_position[0] = number % L.groups[0];
    L.group_position[1] = number / L.groups[0] % L.groups[1];
    L.group_position[2] = number / L.groups[0] / L.groups[1];
    for (int k = 0; k < 3; k++) {
      const uint32_t left = L.grid[k] - L.group_position[k] * L.dispatched[k];
      L.group_size[k] = left < L.dispatched[k] ? left : L.dispatched[k];
    }
    run_group();
  }
  restore_handlers();
  report->groups = total;
  finish(buffers);
  return L.faulted;
}
