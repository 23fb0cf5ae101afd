// Let torch take its large CPU buffers from the pool.
//
// torch's own interface for this is a C++ class, so a library that uses it fits one version of torch. Its library
// libc10.so takes every CPU buffer from posix_memalign and returns it to free. Here the entries of these two functions
// in the table of functions that libc10.so imports are replaced, in libc10.so alone; so this works with any version.
#include "pool.h"

#include <cstdlib>

#ifdef __linux__
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

NATIVE_TEXT(native_text_of_torch_pool)

namespace {

// What `native_pool_serve_torch` returns.
enum Outcome : int64_t { SERVED, NO_MEMORY, NO_TORCH, OTHER_ALLOCATOR, PROTECTED };

#ifdef __linux__

int take(void** out, size_t alignment, size_t size) {
    void* at = size < POOLED || alignment > 64 ? nullptr : pool_take(size);
    if (!at) return posix_memalign(out, alignment, size);
    *out = at;
    return 0;
}

void give(void* at) {
    if (!pool_give(at)) std::free(at);
}

// The parts of a loaded library that say which functions it imports, and where their addresses are.
struct Imports {
    ElfW(Addr) base = 0;
    const ElfW(Rela) * tables[2] = {};
    size_t sizes[2] = {};
    const ElfW(Sym) * symbols = nullptr;
    const char* names = nullptr;
};

bool ends_with(const char* text, const char* end) {
    const size_t size = std::strlen(text), part = std::strlen(end);
    return size >= part && std::strcmp(text + size - part, end) == 0;
}

// Called for each loaded library; returns 1, which ends the search, for torch's libc10.so.
int read_imports(dl_phdr_info* info, size_t, void* found) {
    if (!ends_with(info->dlpi_name, "/libc10.so")) return 0;
    Imports& imports = *static_cast<Imports*>(found);
    imports.base = info->dlpi_addr;
    const ElfW(Dyn)* entry = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    for (; entry && entry->d_tag != DT_NULL; ++entry) {
        // glibc has added the library's address to these values, other C libraries have not.
        const ElfW(Addr) given = entry->d_un.d_ptr;
        const bool is_size = entry->d_tag == DT_PLTRELSZ || entry->d_tag == DT_RELASZ;
        const ElfW(Addr) value = is_size || given >= imports.base ? given : imports.base + given;
        switch (entry->d_tag) {
            case DT_JMPREL: imports.tables[0] = reinterpret_cast<const ElfW(Rela)*>(value); break;
            case DT_PLTRELSZ: imports.sizes[0] = value / sizeof(ElfW(Rela)); break;
            case DT_RELA: imports.tables[1] = reinterpret_cast<const ElfW(Rela)*>(value); break;
            case DT_RELASZ: imports.sizes[1] = value / sizeof(ElfW(Rela)); break;
            case DT_SYMTAB: imports.symbols = reinterpret_cast<const ElfW(Sym)*>(value); break;
            case DT_STRTAB: imports.names = reinterpret_cast<const char*>(value); break;
        }
    }
    return 1;
}

// Call `visit` with the address of each entry of the function `name`; return how many there are.
template <typename Visit>
int entries_of(const Imports& imports, const char* name, Visit visit) {
    int found = 0;
    for (int table = 0; table < 2; ++table)
        for (size_t i = 0; imports.tables[table] && i < imports.sizes[table]; ++i) {
            const ElfW(Rela)& entry = imports.tables[table][i];
            const size_t symbol = ELF64_R_SYM(entry.r_info);
            if (symbol == 0 || std::strcmp(imports.names + imports.symbols[symbol].st_name, name) != 0) continue;
            visit(reinterpret_cast<void**>(imports.base + entry.r_offset));
            ++found;
        }
    return found;
}

// Make the page of an entry writable. It stays writable, as it is where functions are bound at their first call.
bool unprotect(void** entry) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) & ~(page - 1));
    return mprotect(start, page, PROT_READ | PROT_WRITE) == 0;
}

int64_t serve_torch(size_t capacity) {
    Imports imports;
    if (!dl_iterate_phdr(read_imports, &imports)) return NO_TORCH;
    if (!imports.symbols || !imports.names) return OTHER_ALLOCATOR;
    bool writable = true;
    const auto check = [&](void** entry) { writable = unprotect(entry) && writable; };
    if (!entries_of(imports, "posix_memalign", check) || !entries_of(imports, "free", check)) return OTHER_ALLOCATOR;
    if (!writable) return PROTECTED;
    if (!pool_open(capacity)) return NO_MEMORY;
    // Until the second line is done, a buffer of the pool must not be freed by glibc: so `free` comes first.
    entries_of(imports, "free", [](void** entry) { *entry = reinterpret_cast<void*>(give); });
    entries_of(imports, "posix_memalign", [](void** entry) { *entry = reinterpret_cast<void*>(take); });
    return SERVED;
}

#else

int64_t serve_torch(size_t) { return OTHER_ALLOCATOR; }

#endif

}  // namespace

// Let torch, which must be loaded, take buffers of 256 KiB and more from a pool of `capacity` bytes of addresses.
NATIVE_EXPORT int64_t native_pool_serve_torch(int64_t capacity) {
    return serve_torch(static_cast<size_t>(capacity));
}

NATIVE_EXPORT const char* native_source_torch_pool() { return native_text_of_torch_pool; }
