package dispatcher

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// rounds returns how many rounds the metrics have, by the label of the group.
func rounds(t *testing.T, d *Dispatcher) map[string]uint64 {
	t.Helper()
	families, err := d.metrics.registry.Gather()
	require.NoError(t, err)
	found := map[string]uint64{}
	for _, f := range families {
		if f.GetName() != "evenkeel_tick_seconds" {
			continue
		}
		for _, series := range f.GetMetric() {
			for _, l := range series.GetLabel() {
				if l.GetName() == "group" {
					found[l.GetValue()] += series.GetHistogram().GetSampleCount()
				}
			}
		}
	}
	return found
}

// A group's label has the name of its model while a group of another model has the same name. No
// series of an old label stays.
func TestSeriesOfALabelGoWithIt(t *testing.T) {
	d := start(t, testConfig())
	m, other := ranks(1, 9, 0), ranks(1, 9, 0)
	other[0].ID, other[0].Model = 1, "other"
	both := slices.Concat(m, other)
	id := uint64(0)
	round := func(model string) {
		id++
		require.NoError(t, (<-d.Enqueue(&pool.Entry{ID: id, Model: model, Prompt: 1})).Err)
	}
	d.SetWorkers(m)
	round("m")
	require.Equal(t, map[string]uint64{"main": 1}, rounds(t, d))
	d.SetWorkers(both)
	round("m")
	round("other")
	require.Equal(t, map[string]uint64{"m/main": 1, "other/main": 1}, rounds(t, d))
	d.SetWorkers(m)
	round("m")
	require.Equal(t, map[string]uint64{"main": 1}, rounds(t, d))
}

// All groups without a barrier share the series, so these stay when the ranks of one model leave.
func TestSeriesOfGroupsWithoutABarrierStay(t *testing.T) {
	d := start(t, testConfig())
	dense := func(id int32, model string) board.Worker {
		return board.Worker{ID: id, Name: model, Model: model, Slots: 9, Up: true}
	}
	d.SetWorkers([]board.Worker{dense(0, "m"), dense(1, "other")})
	require.NoError(t, (<-d.Enqueue(&pool.Entry{ID: 1, Model: "m", Prompt: 1})).Err)
	d.SetWorkers([]board.Worker{dense(0, "m")})
	require.Equal(t, map[string]uint64{"dense": 1}, rounds(t, d))
	d.SetWorkers(nil)
	require.Empty(t, rounds(t, d))
}
