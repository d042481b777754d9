// sum + a · b in four fused multiply-adds. `sum + dot(a, b)` would take one multiplication, three of them and an
// addition.
//
// gives: add_product
fn add_product(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
