// The functions of generated scalar expressions (llmc/codegen/print_expr.py), over single floats.

__device__ inline float splat(float x) { return x; }
__device__ inline float as_float(bool x) { return x ? 1.0f : 0.0f; }
__device__ inline bool as_mask(float x) { return x != 0.0f; }
__device__ inline float select(bool condition, float yes, float no) { return condition ? yes : no; }
__device__ inline float m_abs(float x) { return fabsf(x); }
__device__ inline float m_floor(float x) { return floorf(x); }
__device__ inline float m_exp(float x) { return expf(x); }
__device__ inline float m_exp2(float x) { return exp2f(x); }
__device__ inline float m_log(float x) { return logf(x); }
__device__ inline float m_sqrt(float x) { return sqrtf(x); }
__device__ inline float m_rsqrt(float x) { return 1.0f / sqrtf(x); }
__device__ inline float m_sin(float x) { return sinf(x); }
__device__ inline float m_cos(float x) { return cosf(x); }
__device__ inline float m_tanh(float x) { return tanhf(x); }
__device__ inline float m_erf(float x) { return erff(x); }
__device__ inline float m_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float m_pow(float x, float y) { return powf(x, y); }

// If one operand is NaN, so is the result, as in the reference.
__device__ inline float m_max(float x, float y) { return x != x || x > y ? x : y; }
__device__ inline float m_min(float x, float y) { return x != x || x < y ? x : y; }
