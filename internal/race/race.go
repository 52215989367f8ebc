// Package race says whether tests run under the race detector, which makes them about ten times slower.
package race

import "testing"

// Alone skips the test if it runs under the race detector. It is for a long test that only computes: the detector finds as much in a
// shorter test of the same code.
func Alone(t *testing.T) {
	t.Helper()
	if Enabled {
		t.Skip("only computes; runs without the race detector")
	}
}
