/* The static executable: CPython, the standard library frozen into it, and the zip archive behind the
   ELF from which the program is imported. tools/static/recipes/link.sh compiles this file. */
#include <Python.h>
#include <limits.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#ifdef OPENSSL_IS_AWSLC
#include <openssl/service_indicator.h>
#endif
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Made by tools/static/freeze.py. */
extern const struct _frozen regsync_frozen[];

static const char PROGRAM[] = "import sys, tree_importer, regsync\nsys.exit(regsync.main())";

/* Nothing was attempted (docs/operations.md, exit statuses). */
#define STATUS_CONFIG 3

/* The longest signature that an RSA key of OpenSSL gives: 16384 bits. */
#define MAX_SIGNATURE 2048
#define MIN_KEY_BITS 2048

/* _regsync_native.sign_rs256(pem, message): the calls that _regsync/crypto.py makes by ctypes elsewhere.
   A static musl cannot open libraries, itself included, and so has no ctypes. */
static PyObject *sign_rs256(PyObject *self, PyObject *args)
{
    Py_buffer pem;
    Py_buffer message;
    if (!PyArg_ParseTuple(args, "y*y*", &pem, &message))
        return NULL;

    PyObject *result = NULL;
    unsigned char signature[MAX_SIGNATURE];
    size_t size = sizeof signature;
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    BIO *text = pem.len <= INT_MAX ? BIO_new_mem_buf(pem.buf, (int)pem.len) : NULL;
    /* The empty pass phrase keeps OpenSSL from asking for one at the terminal. */
    EVP_PKEY *key = text ? PEM_read_bio_PrivateKey(text, NULL, NULL, (void *)"") : NULL;

    if (!key)
        PyErr_SetString(PyExc_ValueError, "does not parse");
    else if (!context || EVP_PKEY_bits(key) < MIN_KEY_BITS
             || EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, key) != 1
             || EVP_DigestSign(context, signature, &size, message.buf, (size_t)message.len) != 1)
        PyErr_SetString(PyExc_ValueError,
                        "was refused by OpenSSL: RSA keys have 2048 to 16384 bits");
    else
        result = PyBytes_FromStringAndSize((char *)signature, (Py_ssize_t)size);

    EVP_MD_CTX_free(context);
    EVP_PKEY_free(key);
    BIO_free(text);
    ERR_clear_error(); /* or TLS would take what is left there for its own */
    PyBuffer_Release(&pem);
    PyBuffer_Release(&message);
    return result;
}

/* _regsync_native.fips_module(): where the module's self-tests have failed, the process has ended before
   main. The version is compiled into the module, unlike that of the library around it. */
static PyObject *fips_module(PyObject *self, PyObject *unused)
{
#ifdef OPENSSL_IS_AWSLC
    if (FIPS_mode() == 1)
        return PyUnicode_FromString(awslc_version_string());
#endif
    return PyUnicode_FromString("");
}

static PyMethodDef native_methods[] = {
    {"sign_rs256", sign_rs256, METH_VARARGS, "Return the RS256 signature of a message."},
    {"fips_module", fips_module, METH_NOARGS, "Return the FIPS module's name, empty without one."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_regsync_native",
    .m_methods = native_methods,
};

static PyObject *init_native(void)
{
    return PyModuleDef_Init(&native_module);
}

static int refuse(const char *reason, const char *path)
{
    static const char head[] = "error: CONFIG_ERROR: ";
    (void)!write(STDERR_FILENO, head, sizeof head - 1);
    (void)!write(STDERR_FILENO, reason, strlen(reason));
    (void)!write(STDERR_FILENO, path, strlen(path));
    (void)!write(STDERR_FILENO, "\n", 1);
    return STATUS_CONFIG;
}

/* Write the path of this file into `own`, which has room for PATH_MAX bytes; 0 where it is unknown. */
static int find_own_file(char *own)
{
    ssize_t length = readlink("/proc/self/exe", own, PATH_MAX - 1);
    if (length > 0 && own[0] == '/') {
        own[length] = 0;
        if (access(own, F_OK) == 0)
            return 1;
    }
    /* Without /proc: the name by which the kernel was asked to start it. */
    const char *name = (const char *)getauxval(AT_EXECFN);
    return name && realpath(name, own) != NULL;
}

static PyStatus set_up(PyConfig *config, const char *own, int argc, char **argv)
{
    struct {
        wchar_t **field;
        const char *value;
    } texts[] = {
        {&config->program_name, own},   {&config->executable, own},
        {&config->base_executable, own}, {&config->stdlib_dir, own},
        {&config->prefix, "/"},         {&config->exec_prefix, "/"},
        {&config->base_prefix, "/"},    {&config->base_exec_prefix, "/"},
        {&config->platlibdir, "lib"},   {&config->run_command, PROGRAM},
    };

    PyConfig_InitIsolatedConfig(config);
    config->site_import = 0;
    config->write_bytecode = 0;
    config->pathconfig_warnings = 0;
    config->parse_argv = 0;             /* all arguments are the program's */
    config->configure_c_stdio = 1;
    config->install_signal_handlers = 1; /* else SIGPIPE ends the process */

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        PyStatus status = PyConfig_SetBytesString(config, texts[i].field, texts[i].value);
        if (PyStatus_Exception(status))
            return status;
    }
    PyStatus status = PyConfig_SetBytesArgv(config, argc, argv);
    if (PyStatus_Exception(status))
        return status;

    config->module_search_paths_set = 1;
    return PyWideStringList_Append(&config->module_search_paths, config->executable);
}

int main(int argc, char **argv)
{
    char own[PATH_MAX];
    if (!find_own_file(own))
        return refuse("regsync cannot find its own file: mount /proc, or start it by its path", "");
    if (access(own, R_OK) != 0)
        return refuse("regsync cannot read its own file; allow it with chmod a+r ", own);

    PyImport_FrozenModules = regsync_frozen;
    PyImport_AppendInittab("_regsync_native", init_native);

    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;                         /* whatever the locale says, as it may not be there */
    before.allocator = PYMEM_ALLOCATOR_MIMALLOC; /* musl's is slow with large buffers */
    PyStatus status = Py_PreInitialize(&before);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);

    PyConfig config;
    status = set_up(&config, own, argc, argv);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
    return Py_RunMain();
}
