package predictor

import (
	"container/list"
	"maps"
)

// keyBuckets keeps the last outputs of a bounded number of keys. A new key is on probation, and is used when it has MinKeyOutputs outputs.
// The keys on probation and the used keys are in two lists, each of which forgets the key whose last output is oldest. Prompts that never
// recur therefore displace only keys on probation.
type keyBuckets struct {
	mostPerList int
	byKey       map[uint64]*keyBucket
	probation   list.List           // keys with too few outputs, as *keyBucket; the key whose last output is oldest is at the front
	used        list.List           // keys with enough outputs, as *keyBucket; the key whose last output is oldest is at the front
	published   map[uint64]*history // histories of the used keys; the last Exact shares the map, so it is copied before a change
}

// keyBucket has the last outputs of one key.
type keyBucket struct {
	key     uint64
	outputs ring
	used    bool
	stale   bool          // keyBuckets.published lacks the last outputs of this key
	element *list.Element // the bucket's element in keyBuckets.probation or keyBuckets.used
}

// newKeyBuckets returns an empty keyBuckets with at most so many keys in each of its two lists.
func newKeyBuckets(most int) keyBuckets {
	return keyBuckets{mostPerList: most, byKey: map[uint64]*keyBucket{}, published: map[uint64]*history{}}
}

func (k *keyBuckets) len() int { return len(k.byKey) }

// push adds a finished output to its key. A key that gets MinKeyOutputs outputs moves from the list probation to the list used. In its
// list, the key then has the newest output, and will be forgotten last. If the list has more than mostPerList keys, push forgets the key
// whose last output is oldest.
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
	b.stale = true         // the next call of tables computes the key's history anew
	newList := k.listOf(b) // by used, so it may be another list than before
	b.element = newList.PushBack(b)
	if newList.Len() > k.mostPerList {
		oldest := newList.Remove(newList.Front()).(*keyBucket) //nolint:forcetypeassert // the lists have no other type
		delete(k.byKey, oldest.key)
	}
}

// listOf returns the list to which a bucket belongs.
func (k *keyBuckets) listOf(b *keyBucket) *list.List {
	if b.used {
		return &k.used
	}
	return &k.probation
}

// tables returns the histories of the used keys, which are those with enough outputs to predict from. It computes only those anew that have
// changed since the last call.
func (k *keyBuckets) tables() map[uint64]*history {
	next := maps.Clone(k.published)
	for key := range next {
		if b := k.byKey[key]; b == nil || !b.used { // the key was forgotten, and may have come back since with too few outputs
			delete(next, key)
		}
	}
	// push moves a key to the end of its list when it changes, so the changed (stale) keys are the last ones.
	for e := k.used.Back(); e != nil; e = e.Prev() {
		b := e.Value.(*keyBucket) //nolint:forcetypeassert // the lists have no other type
		if !b.stale {
			break // no key before this one has changed
		}
		h := newHistory(b.outputs.buf)
		next[b.key], b.stale = &h, false
	}
	k.published = next
	return next
}
