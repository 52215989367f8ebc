package index

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSpeculation(t *testing.T) {
	now := time.Unix(1000, 0)
	keys := prompt(1, 0, 8)
	for _, row := range []struct {
		name string
		do   func(x *Index, s Slot)
		want int32
	}{
		{"blocks count while the probe is in flight", func(x *Index, s Slot) { x.Speculate(s, keys) }, 8},
		{"and after its success", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Confirm(&p)
			x.Sweep(now.Add(time.Hour))
		}, 8},
		{"a failure drops them at once", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Drop(&p)
		}, 0},
		{"a failure leaves what was there", func(x *Index, s Slot) {
			x.Insert(s, keys[:3])
			p := x.Speculate(s, keys)
			x.Drop(&p)
		}, 3},
		{"a failure leaves what another probe computes", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Speculate(s, keys[:5])
			x.Drop(&p)
		}, 5},
		{"a failure leaves what another probe has computed", func(x *Index, s Slot) {
			p, q := x.Speculate(s, keys), x.Speculate(s, keys[:5])
			x.Confirm(&q)
			x.Drop(&p)
		}, 5},
		{"a second end does nothing", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			q := x.Speculate(s, keys)
			x.Drop(&p)
			x.Drop(&p)
			x.Confirm(&p)
			x.ExpireSoon(&p, now)
			x.Sweep(now.Add(time.Hour))
			_ = q
		}, 8},
		{"an unknown outcome counts until its TTL", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.ExpireSoon(&p, now)
			x.Sweep(now.Add(2*time.Second - 1))
		}, 8},
		{"and not longer", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.ExpireSoon(&p, now)
			x.Sweep(now.Add(2 * time.Second))
		}, 0},
		{"unless the engine's events said so meanwhile", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.ExpireSoon(&p, now)
			x.Insert(s, keys[:4])
			x.Sweep(now.Add(2 * time.Second))
		}, 4},
		{"a block removed by an event stays while a probe computes it", func(x *Index, s Slot) {
			x.Insert(s, keys)
			x.Speculate(s, keys)
			x.Remove(s, keys[2])
		}, 8},
		{"and no longer once it has been told of", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Insert(s, keys[:5])
			x.ExpireSoon(&p, now)
			x.Remove(s, keys[4])
			x.Remove(s, keys[6]) // not told of yet
		}, 4},
		{"told of after its answer", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.ExpireSoon(&p, now)
			x.Insert(s, keys[:5])
			x.Remove(s, keys[4])
		}, 4},
		{"a settled part is not ended twice", func(x *Index, s Slot) {
			x.Insert(s, keys[:5])
			p := x.Speculate(s, keys)
			x.Speculate(s, keys)
			x.ExpireSoon(&p, now)
			x.Sweep(now.Add(time.Hour))
			x.Remove(s, keys[2])
		}, 8},
		{"a restart ends it", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Clear(s, Removed)
			x.Confirm(&p)
		}, 0},
		{"what was dropped in its flight is not its own any more", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			x.Correct(s, keys, 0)
			x.Speculate(s, keys)
			x.Drop(&p)
		}, 8},
		{"success brings back what had no room in its flight", func(x *Index, s Slot) {
			p := x.Speculate(s, keys)
			require.Equal(t, 6, x.Correct(s, keys, 2))
			x.Confirm(&p)
		}, 8},
		{"an engine that had less is believed", func(x *Index, s Slot) {
			x.Insert(s, keys)
			x.Correct(s, keys, 2)
		}, 2},
	} {
		t.Run(row.name, func(t *testing.T) {
			x := New(Config{})
			s := x.Add("a", 0)
			row.do(x, s)
			require.Equal(t, []int32{row.want}, x.Match(nil, keys))
			consistent(t, x)
		})
	}
}

func TestSweepAtManyLingering(t *testing.T) {
	x, now := New(Config{}), time.Unix(0, 0)
	s := x.Add("a", 0)
	for i := range int32(100) {
		p := x.Speculate(s, prompt(i+1, 0, 2))
		x.ExpireSoon(&p, now.Add(time.Duration(i)*20*time.Millisecond))
	}
	x.Sweep(now.Add(3 * time.Second))
	require.Equal(t, 2*49, x.Held(s))
	require.EqualValues(t, 2*51, x.Stats().Evictions[TTL])
}
