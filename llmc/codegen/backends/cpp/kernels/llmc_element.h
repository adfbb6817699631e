// Scalar primitives for operands of any C++ type (int64_t, float, bool). llmc_math.h has those for vectors.
#ifndef LLMC_ELEMENT_H
#define LLMC_ELEMENT_H
namespace llmc {
template <class A> LLMC_INLINE auto e_abs(A a) { return a < 0 ? -a : +a; }
LLMC_INLINE float e_abs(float a) { return m_abs(a); }
template <class A, class B> LLMC_INLINE auto e_max(A a, B b) -> decltype(a + b) { return a > b || a != a ? a : b; }
template <class A, class B> LLMC_INLINE auto e_min(A a, B b) -> decltype(a + b) { return a < b || a != a ? a : b; }
template <class A> LLMC_INLINE A e_floor(A a) { return a; }
LLMC_INLINE float e_floor(float a) { return m_floor(a); }
}  // namespace llmc
#endif
