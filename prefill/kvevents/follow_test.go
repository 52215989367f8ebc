package kvevents

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// publisher is one that a test makes: what it keeps for replays, from a batch on.
type publisher struct {
	kept  []uint64
	fails bool
	boot  string
	asked []uint64
}

func (p *publisher) replay(from uint64, yield func(uint64, []byte) bool) error {
	p.asked = append(p.asked, from)
	if p.fails {
		return errors.New("silent")
	}
	for _, seq := range p.kept {
		if seq >= from && !yield(seq, p.text(seq)) {
			return nil
		}
	}
	return nil
}

func (p *publisher) text(seq uint64) []byte { return fmt.Append(nil, p.boot, seq) }

// followed writes down what a follower does.
func followed(p *publisher) (*follower, *[]string) {
	var did []string
	return &follower{replay: p.replay, counters: &counters{},
		apply:   func(payload []byte) { did = append(did, string(payload)) },
		dropAll: func() { did = append(did, "cold") },
	}, &did
}

func TestG25(t *testing.T) {
	for _, row := range []struct {
		name           string
		kept           []uint64
		fails          bool
		did            []string
		replayed, cold int64
	}{
		{"what is missed comes from the replay, what comes late is ignored", []uint64{12, 13}, false, []string{"10", "11", "12", "13", "14"}, 1, 0},
		{"the replay may have the live one too", []uint64{12, 13, 14}, false, []string{"10", "11", "12", "13", "14"}, 1, 0},
		{"a replay that begins too late is cold", []uint64{13}, false, []string{"10", "11", "cold", "13", "14"}, 0, 1},
		{"so is one with a hole", []uint64{12, 14}, false, []string{"10", "11", "12", "cold", "14"}, 0, 1},
		{"one that ends too early", []uint64{12}, false, []string{"10", "11", "12", "cold", "14"}, 0, 1},
		{"one that is empty", nil, false, []string{"10", "11", "cold", "14"}, 0, 1},
		{"and one that does not come", []uint64{12, 13}, true, []string{"10", "11", "cold", "14"}, 0, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := &publisher{}
			f, did := followed(p)
			f.resumeOrRestart()
			p.kept, p.fails = row.kept, row.fails
			for _, seq := range []uint64{10, 11, 14, 12} {
				f.receiveLive(seq, p.text(seq))
			}
			require.Equal(t, row.did, *did)
			require.Equal(t, []uint64{0, 12}, p.asked)
			replayed, cold := f.counters.gapsReplayed.Load(), f.counters.gapsCold.Load()
			require.Equal(t, []int64{row.replayed, row.cold}, []int64{replayed, cold})
		})
	}
}

func TestANewConnection(t *testing.T) {
	for _, row := range []struct {
		name string
		p    publisher
		did  []string
	}{
		{"goes on after the last batch", publisher{kept: []uint64{2, 3, 4, 5}}, []string{"4", "5"}},
		{"with nothing new", publisher{kept: []uint64{1, 2, 3}}, nil},
		{"of a publisher that started again begins anew", publisher{boot: "b", kept: []uint64{0, 1}}, []string{"cold", "b0", "b1"}},
		{"of one that has passed the same number since", publisher{boot: "b", kept: []uint64{2, 3, 4}}, []string{"cold", "b2", "b3", "b4"}},
		{"of one that has forgotten the last batch", publisher{kept: []uint64{5, 6}}, []string{"cold", "5", "6"}},
		{"of one without a replay", publisher{fails: true}, []string{"cold"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := &publisher{kept: []uint64{0, 1, 2, 3}}
			f, did := followed(p)
			f.resumeOrRestart()
			require.Equal(t, []string{"0", "1", "2", "3"}, *did, "the first connection takes all there is")
			*did = nil
			*p = row.p
			f.resumeOrRestart()
			require.Equal(t, row.did, *did)
			require.Zero(t, f.counters.gapsCold.Load(), "nobody is to be alarmed")
		})
	}
}

// Whatever is lost on the way: what was applied since the last cold is a row
// without a hole, and ends with the last live batch.
func TestNoHoles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &publisher{}
		f, did := followed(p)
		f.resumeOrRestart()
		next := rapid.Uint64Range(0, 3).Draw(t, "first")
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			seq := next
			next++
			p.kept = append(p.kept, seq)
			if len(p.kept) > 6 {
				p.kept = p.kept[1:]
			}
			p.fails = rapid.IntRange(0, 5).Draw(t, "fails") == 0
			if rapid.IntRange(0, 2).Draw(t, "lost") == 0 {
				continue
			}
			f.receiveLive(seq, p.text(seq))
			if rapid.IntRange(0, 4).Draw(t, "late") == 0 {
				f.receiveLive(seq, p.text(seq))
			}
			row := *did
			for i, what := range row {
				if what == "cold" {
					row = (*did)[i+1:]
				}
			}
			require.NotEmpty(t, row)
			for i, what := range row {
				require.Equal(t, fmt.Sprint(seq-uint64(len(row)-1-i)), what, "%v", *did)
			}
		}
	})
}
