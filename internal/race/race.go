// Package race says whether tests run under the race detector, which makes them about ten times
// slower.
package race

import "testing"

// Alone is for a long test that only computes: the detector finds as much in a shorter one of the
// same code.
func Alone(t *testing.T) {
	t.Helper()
	if Enabled {
		t.Skip("only computes; runs without the race detector")
	}
}
