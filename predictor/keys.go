package predictor

import (
	"container/list"
	"maps"
)

// keyBuckets keeps the last outputs of a bounded number of keys. A new key is on probation until it
// has MinKeyOutputs outputs. Each of the two lists forgets the key whose last output is oldest, so
// prompts that never recur displace only keys on probation.
type keyBuckets struct {
	mostPerList int
	byKey       map[uint64]*keyBucket
	probation   list.List           // keys with too few outputs, as *keyBucket; the one with the oldest last output is at the front
	used        list.List           // the same for keys with enough outputs
	published   map[uint64]*history // histories of the used keys; the last Exact shares the map, so it is copied before a change
}

type keyBucket struct {
	key     uint64
	outputs ring
	used    bool
	stale   bool          // keyBuckets.published lacks its last outputs
	element *list.Element // in probation or used
}

func newKeyBuckets(most int) keyBuckets {
	return keyBuckets{mostPerList: most, byKey: map[uint64]*keyBucket{}, published: map[uint64]*history{}}
}

func (k *keyBuckets) len() int { return len(k.byKey) }

// push makes a key the last one that its list will forget.
func (k *keyBuckets) push(key uint64, output int32) {
	b := k.byKey[key]
	if b == nil {
		b = &keyBucket{key: key, outputs: newRing(KeyOutputsMost)}
		k.byKey[key] = b
	} else {
		k.listOf(b).Remove(b.element)
	}
	b.outputs.push(output)
	b.used = len(b.outputs.buf) >= MinKeyOutputs
	b.stale = true
	newList := k.listOf(b) // by used, so it may be another list than before
	b.element = newList.PushBack(b)
	if newList.Len() > k.mostPerList {
		oldest := newList.Remove(newList.Front()).(*keyBucket) //nolint:forcetypeassert // the lists have no other type
		delete(k.byKey, oldest.key)
	}
}

func (k *keyBuckets) listOf(b *keyBucket) *list.List {
	if b.used {
		return &k.used
	}
	return &k.probation
}

// tables computes only the histories that have changed since the last call.
func (k *keyBuckets) tables() map[uint64]*history {
	next := maps.Clone(k.published)
	for key := range next {
		if b := k.byKey[key]; b == nil || !b.used { // it was forgotten, and may have come back with too few outputs
			delete(next, key)
		}
	}
	// push moves a changed key to the end of its list.
	for e := k.used.Back(); e != nil; e = e.Prev() {
		b := e.Value.(*keyBucket) //nolint:forcetypeassert // the lists have no other type
		if !b.stale {
			break
		}
		h := newHistory(b.outputs.buf)
		next[b.key], b.stale = &h, false
	}
	k.published = next
	return next
}
