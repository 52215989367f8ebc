package queue

// ordered is a heap whose members store their own index, so that any member can be removed. The index is -1 while a member
// is not in the heap.
type ordered[T any] struct {
	members []T
	before  func(a, b T) bool
	index   func(T) *int // returns where the member stores its index
}

// Len, Less, Swap, Push and Pop are for container/heap.
func (o *ordered[T]) Len() int           { return len(o.members) }
func (o *ordered[T]) Less(i, j int) bool { return o.before(o.members[i], o.members[j]) }

// Swap also updates the indices that the members store.
func (o *ordered[T]) Swap(i, j int) {
	o.members[i], o.members[j] = o.members[j], o.members[i]
	*o.index(o.members[i]), *o.index(o.members[j]) = i, j
}

// Push appends a member; container/heap then moves it to its place.
func (o *ordered[T]) Push(x any) {
	*o.index(x.(T)) = len(o.members)
	o.members = append(o.members, x.(T))
}

// Pop removes the last member; container/heap has moved the one that leaves the heap there.
func (o *ordered[T]) Pop() any {
	last := len(o.members) - 1
	x := o.members[last]
	var zero T
	o.members[last] = zero // lets the garbage collector free the member
	o.members = o.members[:last]
	*o.index(x) = -1
	return x
}
