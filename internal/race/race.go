// Package race tells tests whether the race detector watches them. It makes them about ten times slower.
package race

import "testing"

// Alone skips a test under the race detector that is long because it computes, each result in a goroutine of its
// own: a shorter test of the same code shows the detector as much. The pass without the detector runs it.
func Alone(t *testing.T) {
	t.Helper()
	if Enabled {
		t.Skip("only computes; runs without the race detector")
	}
}
