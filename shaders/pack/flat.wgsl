// A one-dimensional grid, folded into two dimensions because a device dispatches few workgroups per dimension.
//
// gives: FLAT_WORKGROUP, flat_index

const FLAT_WORKGROUP: u32 = 64u;

fn flat_index(group: vec3<u32>, groups: vec3<u32>, invocation: u32) -> u32 {
    return (group.y * groups.x + group.x) * FLAT_WORKGROUP + invocation;
}
