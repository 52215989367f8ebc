package predictor

import (
	"container/list"
	"maps"
)

// keyBuckets keeps the last outputs of a bounded number of keys. A key
// starts on probation and is used once it has MinKeyOutputs. Each of the two lists forgets
// the key that finished longest ago. So prompts that never recur push out only one
// another, and not the prompts that recur.
type keyBuckets struct {
	mostPerList int
	byKey       map[uint64]*keyBucket
	probation   list.List           // of *keyBucket, in the order of the last output
	used        list.List           // likewise
	published   map[uint64]*history // of the used; shared with the last Exact, so copied before a change
}

type keyBucket struct {
	key     uint64
	outputs ring
	used    bool
	stale   bool          // published does not have its last outputs
	element *list.Element // of its list
}

func newKeyBuckets(most int) keyBuckets {
	return keyBuckets{mostPerList: most, byKey: map[uint64]*keyBucket{}, published: map[uint64]*history{}}
}

func (k *keyBuckets) len() int { return len(k.byKey) }

// push adds a finished output to its key, and makes the key the last one to be forgotten. If its list then has more than mostPerList
// keys, the key that finished longest ago is forgotten.
func (k *keyBuckets) push(key uint64, output int32) {
	b := k.byKey[key]
	if b == nil {
		b = &keyBucket{key: key, outputs: newRing(KeyOutputsMost)}
		k.byKey[key] = b
	} else {
		k.list(b).Remove(b.element)
	}
	b.outputs.push(output)
	b.used, b.stale = len(b.outputs.buf) >= MinKeyOutputs, true
	l := k.list(b)
	b.element = l.PushBack(b)
	if l.Len() > k.mostPerList {
		oldest := l.Remove(l.Front()).(*keyBucket) //nolint:forcetypeassert // nothing else is in it
		delete(k.byKey, oldest.key)
	}
}

func (k *keyBuckets) list(b *keyBucket) *list.List {
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
	for e := k.used.Back(); e != nil; e = e.Prev() {
		b := e.Value.(*keyBucket) //nolint:forcetypeassert // nothing else is in it
		if !b.stale {
			break // those that changed are the last in the list
		}
		h := newHistory(b.outputs.buf)
		next[b.key], b.stale = &h, false
	}
	k.published = next
	return next
}
