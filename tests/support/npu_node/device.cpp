// A make-believe NPU: torch's private device with a CPU's memory and kernels, so that the path to torch_npu runs anywhere.
// Tensors say npu:0, mixing them with a CPU's fails as on the true device, and every kernel that is not here is the CPU's.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <torch/library.h>

namespace {
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
size_t held = 0, highest = 0;

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<size_t*>(std::aligned_alloc(64, (bytes + 64 + 63) / 64 * 64));
    *block = bytes;
    held += bytes;
    highest = std::max(highest, held);
    return {block + 8, block, &release, c10::Device(NPU, current)};
  }
  static void release(void* block) {
    held -= *static_cast<size_t*>(block);
    std::free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(NPU, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device to) const override {
    c10::Device before(NPU, current);
    current = to.index();
    return before;
  }
  c10::Device getDevice() const override { return {NPU, current}; }
  void setDevice(c10::Device to) const override { current = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = memory.allocate(bytes);
    std::memcpy(grown.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// The same bytes as a CPU's tensor.
at::Tensor there(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  there(to).copy_(there(from));
  return to;
}

const at::Tensor& resized(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resized(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar scalar(const at::Tensor& self) { return at::_local_scalar_dense(there(self)); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resized);
  m.impl("_local_scalar_dense", scalar);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  // torch's composite would keep the row statistics in the type of the input; CANN keeps them in fp32, as a CPU does.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
}
}  // namespace

extern "C" {
void npu_set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
int npu_device() { return current; }
size_t npu_highest() { return highest; }
}
