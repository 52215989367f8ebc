package predictor

import "maps"

// keyBuckets keep the last outputs of keys, of a bounded number of them. A key
// starts on probation and is used once it has MinKeyOutputs; each list forgets
// the key that finished longest ago. Prompts that never recur so push out one
// another, not those that do.
type keyBuckets struct {
	most      int
	byKey     map[uint64]*keyBucket
	probation keyList
	used      keyList
	published map[uint64]*history // of the used; shared with the last Exact, so copied before a change
}

type keyBucket struct {
	key        uint64
	outputs    ring
	used       bool
	stale      bool // published does not have its last outputs
	prev, next *keyBucket
}

func newKeyBuckets(most int) keyBuckets {
	return keyBuckets{most: most, byKey: map[uint64]*keyBucket{}, published: map[uint64]*history{}}
}

func (k *keyBuckets) len() int { return len(k.byKey) }

func (k *keyBuckets) push(key uint64, output int32) {
	b := k.byKey[key]
	if b == nil {
		b = &keyBucket{key: key, outputs: newRing(KeyOutputsMost)}
		k.byKey[key] = b
	} else {
		k.list(b).remove(b)
	}
	b.outputs.push(output)
	b.used, b.stale = len(b.outputs.buf) >= MinKeyOutputs, true
	l := k.list(b)
	l.append(b)
	if l.n > k.most {
		oldest := l.first
		l.remove(oldest)
		delete(k.byKey, oldest.key)
	}
}

func (k *keyBuckets) list(b *keyBucket) *keyList {
	if b.used {
		return &k.used
	}
	return &k.probation
}

// tables returns the histories of the keys in use. Only what changed since the
// last call is worked out again.
func (k *keyBuckets) tables() map[uint64]*history {
	next := maps.Clone(k.published)
	for key := range next {
		if b := k.byKey[key]; b == nil || !b.used {
			delete(next, key)
		}
	}
	for b := k.used.last; b != nil && b.stale; b = b.prev { // those that changed are the last in the list
		h := newHistory(b.outputs.buf)
		next[b.key], b.stale = &h, false
	}
	k.published = next
	return next
}

// keyList is in the order of the last output.
type keyList struct {
	first, last *keyBucket
	n           int
}

func (l *keyList) append(b *keyBucket) {
	b.prev, b.next = l.last, nil
	if l.last != nil {
		l.last.next = b
	} else {
		l.first = b
	}
	l.last = b
	l.n++
}

func (l *keyList) remove(b *keyBucket) {
	if b.prev != nil {
		b.prev.next = b.next
	} else {
		l.first = b.next
	}
	if b.next != nil {
		b.next.prev = b.prev
	} else {
		l.last = b.prev
	}
	b.prev, b.next = nil, nil
	l.n--
}
