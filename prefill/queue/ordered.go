package queue

// ordered is a heap whose members store their own index (-1: not in the heap), so that any member
// can be removed.
type ordered[T any] struct {
	members []T
	before  func(a, b T) bool
	index   func(T) *int // where the member stores its index
}

// Len, Less, Swap, Push and Pop are for container/heap.
func (o *ordered[T]) Len() int           { return len(o.members) }
func (o *ordered[T]) Less(i, j int) bool { return o.before(o.members[i], o.members[j]) }

func (o *ordered[T]) Swap(i, j int) {
	o.members[i], o.members[j] = o.members[j], o.members[i]
	*o.index(o.members[i]), *o.index(o.members[j]) = i, j
}

func (o *ordered[T]) Push(x any) {
	*o.index(x.(T)) = len(o.members)
	o.members = append(o.members, x.(T))
}

func (o *ordered[T]) Pop() any {
	last := len(o.members) - 1
	x := o.members[last]
	var zero T
	o.members[last] = zero // lets the garbage collector free the member
	o.members = o.members[:last]
	*o.index(x) = -1
	return x
}
